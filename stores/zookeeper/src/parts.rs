//! Values that are too long for one node: ZooKeeper takes a little less than one MiB in one request, with everything around
//! it. Long values are cut into parts, which are written before the record that names them.

use std::sync::Arc;

use futures_util::future::join_all;
use lockkeeper_core::{Error, Result};
use serde::{Deserialize, Serialize};
use zookeeper_client::{self as zk, CreateMode};

use crate::fault::Failure;
use crate::link::Session;
use crate::store::Shared;

/// As much as is written in one node.
const PART: usize = 512 << 10;

/// What stands before the value in the node of a record.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Head {
    /// The record is gone that long after it was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Where the value is, if it is not here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
}

impl Head {
    /// A line of JSON, then the value.
    pub fn with(&self, value: &[u8]) -> Vec<u8> {
        let mut data = serde_json::to_vec(self).unwrap_or_default();
        data.push(b'\n');
        data.extend_from_slice(value);
        data
    }

    pub fn split(data: &[u8]) -> Option<(Head, &[u8])> {
        let end = data.iter().position(|byte| *byte == b'\n')?;
        Some((serde_json::from_slice(&data[..end]).ok()?, &data[end + 1..]))
    }
}

impl Shared {
    /// The data of a record's node. Parts are written first; whoever does not get to name them takes them away again.
    pub async fn write_parts(
        &self,
        session: &Session,
        value: &[u8],
        ttl_ms: Option<u64>,
    ) -> Result<(Vec<u8>, Head)> {
        let mut head = Head { ttl_ms, parts: Vec::new() };
        if value.len() <= PART {
            return Ok((head.with(value), head));
        }
        session.make_all(&self.layout.parts(), self.link.acls()).await?;
        let mode = CreateMode::PersistentSequential.with_acls(self.link.acls());
        let prefix = format!("{}/p-", self.layout.parts());
        for part in value.chunks(PART) {
            match session.hear(session.client.create(&prefix, part, &mode)).await {
                Ok((_, number)) => head.parts.push(format!("p-{number}")),
                Err(failure) => {
                    self.delete_parts(session, &head.parts).await;
                    // A part that nobody names is no record.
                    return Err(match Error::from(failure) {
                        Error::Unknown(text) => Error::Unavailable(text),
                        error => error,
                    });
                }
            }
        }
        Ok((head.with(&[]), head))
    }

    /// The value of a record. `None`: it was written anew meanwhile.
    pub async fn read_parts(
        &self,
        session: &Session,
        head: &Head,
        here: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        if head.parts.is_empty() {
            return Ok(Some(here.to_vec()));
        }
        let paths: Vec<String> =
            head.parts.iter().map(|part| format!("{}/{part}", self.layout.parts())).collect();
        let mut value = Vec::new();
        for part in join_all(paths.iter().map(|path| session.get(path))).await {
            match part {
                Ok((data, _)) => value.extend(data),
                Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(None),
                Err(failure) => return Err(failure),
            }
        }
        Ok(Some(value))
    }

    /// Nobody names them any more.
    pub async fn delete_parts(&self, session: &Session, parts: &[String]) {
        for part in parts {
            _ = session.delete(&format!("{}/{part}", self.layout.parts())).await;
        }
    }

    pub fn delete_parts_later(self: &Arc<Self>, session: &Arc<Session>, parts: Vec<String>) {
        if !parts.is_empty() {
            let (shared, session) = (self.clone(), session.clone());
            tokio::spawn(async move { shared.delete_parts(&session, &parts).await });
        }
    }
}
