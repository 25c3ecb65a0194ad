//! The examination of the nodes: which of them reply, what they say, and their clocks.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use lockkeeper_core::{ClockReading, Examination, Examine, Finding, Promise, Result, ServerReport};
use lockkeeper_redis::{info_findings, read_info, read_time, server_report, silent_server};
use lockkeeper_store_kit::read_clock;

use crate::quorum::Quorum;
use crate::store::RedlockStore;

#[async_trait]
impl Examine for RedlockStore {
    async fn examine(&self) -> Result<Examination> {
        let quorum = self.quorum();
        let mut found = Examination::default();
        let replies = join_all(quorum.nodes.iter().map(|node| read_info(&node.connection))).await;
        let alive = replies.iter().filter(|reply| reply.is_ok()).count();
        for (node, reply) in quorum.nodes.iter().zip(replies) {
            let address = node.connection.endpoint().to_string();
            match reply {
                Ok(info) => {
                    found.findings.extend(info_findings(&address, &info));
                    found.servers.push(server_report(address, &info));
                }
                Err(failure) => {
                    found.findings.push(silent_server("the node", &address, failure));
                    found.servers.push(ServerReport::new(address));
                }
            }
        }
        found.findings.extend(quorum_finding(quorum, alive));
        Ok(found)
    }

    async fn read_clocks(&self) -> Result<Vec<ClockReading>> {
        let quorum = self.quorum();
        let readings = quorum.nodes.iter().map(|node| {
            let address = node.connection.endpoint().to_string();
            read_clock(&*quorum.options.clock, address, Duration::from_micros(1), read_time(&node.connection))
        });
        // A node without a reply is a finding of `examine`.
        Ok(join_all(readings).await.into_iter().flatten().collect())
    }
}

/// How many more nodes may fail, if that is none.
fn quorum_finding(quorum: &Quorum, alive: usize) -> Option<Finding> {
    let (size, all) = (quorum.size, quorum.nodes.len());
    let text = match alive {
        alive if alive > size => return None,
        alive if alive == size => {
            format!(
                "{alive} of {all} nodes reply, and {size} are needed: if one more fails, no lock is granted or renewed"
            )
        }
        alive => {
            format!("{alive} of {all} nodes reply, and {size} are needed: no lock is granted or renewed")
        }
    };
    let finding = if alive < size {
        Finding::harm(Promise::Availability, text)
    } else if alive == all {
        return None;
    } else {
        Finding::risk(Promise::Availability, text)
    };
    Some(finding.change("nodes that reply", alive.to_string(), all.to_string()))
}
