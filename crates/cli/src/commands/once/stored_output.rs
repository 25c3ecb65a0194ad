//! The output of a command as `once` stores it.

use serde_json::{Value, json};

use crate::child::capture::CapturedStream;
use crate::report::Report;

/// The stored result of a command: one line of JSON, then its stdout and its stderr.
pub struct StoredOutput {
    pub code: i32,
    pub out: CapturedStream,
    pub err: CapturedStream,
}

impl StoredOutput {
    pub fn bytes(&self) -> Vec<u8> {
        let head = json!({
            "exit_code": self.code, "stdout": self.out.bytes.len(), "stdout_cut": self.out.cut,
            "stderr": self.err.bytes.len(), "stderr_cut": self.err.cut,
        });
        [head.to_string().as_bytes(), b"\n", &self.out.bytes, &self.err.bytes].concat()
    }

    pub fn parse(bytes: &[u8]) -> Option<StoredOutput> {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let head: Value = serde_json::from_slice(&bytes[..end]).ok()?;
        let size = |key: &str| head[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let (out, err) = bytes[end + 1..].split_at_checked(size("stdout")?)?;
        let kept = |bytes: &[u8], cut: &str| CapturedStream { bytes: bytes.to_vec(), cut: head[cut] == true };
        let code = i32::try_from(head["exit_code"].as_i64()?).ok()?;
        (err.len() == size("stderr")?).then(|| StoredOutput {
            code,
            out: kept(out, "stdout_cut"),
            err: kept(err, "stderr_cut"),
        })
    }

    pub fn report_cut(&self, report: &Report) {
        for (what, kept) in [("stdout", &self.out), ("stderr", &self.err)] {
            if kept.cut {
                report.event("cut", json!({ "stream": what, "kept_bytes": kept.bytes.len() }));
                report.say(&format!("only the first MiB of {what} is kept for later calls"));
            }
        }
    }
}
