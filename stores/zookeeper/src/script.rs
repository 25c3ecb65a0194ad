//! Exactly what we say to ZooKeeper: the steps of a transaction, which happen all or not at all.

use zookeeper_client::{Acls, CreateMode};

/// A version that is not looked at.
pub const ANY: i32 = -1;

#[derive(Clone, Debug)]
pub enum Op {
    Check(String, i32),
    Create { path: String, data: Vec<u8>, mode: CreateMode },
    Set { path: String, data: Vec<u8>, version: i32 },
    Delete(String, i32),
}

impl Op {
    /// How many bytes it is, about.
    pub fn size(&self) -> usize {
        match self {
            Op::Check(path, _) | Op::Delete(path, _) => path.len(),
            Op::Create { path, data, .. } | Op::Set { path, data, .. } => path.len() + data.len(),
        }
    }

    /// Both check the same, and write nothing.
    pub fn is_same_check(&self, other: &Op) -> bool {
        matches!((self, other), (Op::Check(a, i), Op::Check(b, j)) if a == b && i == j)
    }
}

/// The node is there, in this version.
pub fn check(path: impl Into<String>, version: i32) -> Op {
    Op::Check(path.into(), version)
}

/// It goes with our session. Its name ends with the next number of its parent.
pub fn stand(path: impl Into<String>, data: Vec<u8>) -> Op {
    Op::Create { path: path.into(), data, mode: CreateMode::EphemeralSequential }
}

/// It stays.
pub fn create(path: impl Into<String>, data: Vec<u8>) -> Op {
    Op::Create { path: path.into(), data, mode: CreateMode::Persistent }
}

pub fn set(path: impl Into<String>, data: Vec<u8>, version: i32) -> Op {
    Op::Set { path: path.into(), data, version }
}

pub fn delete(path: impl Into<String>, version: i32) -> Op {
    Op::Delete(path.into(), version)
}

/// Who may do what with the nodes we make.
pub fn acls(login: bool) -> Acls<'static> {
    if login { Acls::creator_all() } else { Acls::anyone_all() }
}
