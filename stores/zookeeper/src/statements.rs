//! The operations of a transaction: exactly what the store sends to ZooKeeper. A transaction is applied completely or
//! not at all.

use zookeeper_client::{Acls, CreateMode};

/// Matches every version.
pub const ANY: i32 = -1;

#[derive(Clone, Debug)]
pub enum TxnOp {
    Check(String, i32),
    Create { path: String, data: Vec<u8>, mode: CreateMode },
    Set { path: String, data: Vec<u8>, version: i32 },
    Delete(String, i32),
}

impl TxnOp {
    /// The approximate size in bytes.
    pub fn size(&self) -> usize {
        match self {
            TxnOp::Check(path, _) | TxnOp::Delete(path, _) => path.len(),
            TxnOp::Create { path, data, .. } | TxnOp::Set { path, data, .. } => path.len() + data.len(),
        }
    }

    /// Whether both are the same check.
    pub fn is_same_check(&self, other: &TxnOp) -> bool {
        matches!((self, other), (TxnOp::Check(a, i), TxnOp::Check(b, j)) if a == b && i == j)
    }
}

/// Checks that a node exists with this version.
pub fn check(path: impl Into<String>, version: i32) -> TxnOp {
    TxnOp::Check(path.into(), version)
}

/// Creates an ephemeral sequential node: the servers delete it with the session, and append the parent's next number
/// to its name.
pub fn create_ephemeral(path: impl Into<String>, data: Vec<u8>) -> TxnOp {
    TxnOp::Create { path: path.into(), data, mode: CreateMode::EphemeralSequential }
}

/// Creates a persistent node.
pub fn create(path: impl Into<String>, data: Vec<u8>) -> TxnOp {
    TxnOp::Create { path: path.into(), data, mode: CreateMode::Persistent }
}

pub fn set(path: impl Into<String>, data: Vec<u8>, version: i32) -> TxnOp {
    TxnOp::Set { path: path.into(), data, version }
}

pub fn delete(path: impl Into<String>, version: i32) -> TxnOp {
    TxnOp::Delete(path.into(), version)
}

/// The rights on the nodes that the store creates.
pub fn acls(login: bool) -> Acls<'static> {
    if login { Acls::creator_all() } else { Acls::anyone_all() }
}
