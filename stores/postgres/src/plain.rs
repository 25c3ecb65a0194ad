//! What often makes a lock unnecessary: conditional writes of the database itself.
