//! Renew: starts the lease of a grant again.

use lockkeeper_core::{Attempt, RenewOutcome, Result};
use rusqlite::params;

use crate::codec::{instant_nanos, signed};
use crate::statements;
use crate::transaction::Tx;

impl Tx<'_> {
    /// Starts the lease again, unless it has ended or the grant is revoked. The process that renews a grant becomes the
    /// process whose end frees it.
    pub fn renew(&mut self, attempt: &Attempt) -> Result<RenewOutcome> {
        let process = &self.identity.process;
        let row = params![
            attempt.as_bytes(),
            instant_nanos(self.now.moment),
            process.pid,
            signed(process.start),
            signed(process.namespace)
        ];
        if self.change(statements::RENEW, row)? == 1 {
            return Ok(RenewOutcome::Renewed);
        }
        let hold = self.hold(attempt)?.filter(|hold| hold.expires > self.now.moment);
        let reason = hold.map(|hold| self.revoke_reason(&hold)).transpose()?.flatten();
        Ok(reason.map_or(RenewOutcome::Lost, |reason| RenewOutcome::Revoked(reason.into())))
    }
}
