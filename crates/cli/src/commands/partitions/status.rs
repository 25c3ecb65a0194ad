//! `lockkeeper partitions --status` and `--of`: the members, the owners of the partitions, and what is moving.

use std::time::Duration;

use lockkeeper::partitions::{GroupStatus, PartitionStatus, partition_of};
use lockkeeper::{Lockkeeper, Outcome};
use serde_json::json;

use super::PartitionsArgs;
use crate::duration;
use crate::exit::{ExitFailure, OK};
use crate::output::{self, bold};
use crate::text::{self, columns, plain, quoted};

/// The exit code for a group without members, as `record` has it for a record that is not there.
const NO_GROUP: i32 = 66;

pub async fn print(args: &PartitionsArgs, keeper: &Lockkeeper) -> Result<i32, ExitFailure> {
    let status = keeper.partition_status(args.group().as_str()).await?;
    if let (Some(status), Some(count)) = (&status, args.count)
        && status.count != count
    {
        let why = format!("the group has {} partitions, and not {count}", status.count);
        return Err(ExitFailure::new(Outcome::Invalid, why)
            .next("leave --count out, or give the same one everywhere"));
    }
    match (&args.of, status) {
        (Some(key), status) => of(args, key, status),
        (None, Some(status)) => table(args, &status),
        (None, None) => none(args),
    }
}

/// The partition of a key, and its owner.
fn of(args: &PartitionsArgs, key: &str, status: Option<GroupStatus>) -> Result<i32, ExitFailure> {
    let Some(count) = status.as_ref().map(|status| status.count).or(args.count) else {
        let why = format!("no member has joined the group {}", quoted(args.group().as_str()));
        return Err(ExitFailure::new(Outcome::Invalid, why)
            .with_code(NO_GROUP)
            .next("give --count, or start a member"));
    };
    let number = partition_of(key, count);
    let partition = status.as_ref().map(|status| status.partition_of(key));
    if args.job.common.json {
        let (assigned, owner, moving) = match partition {
            Some(p) => (p.assigned.clone(), p.owner.clone(), p.moving),
            None => (None, None, false),
        };
        let line = json!({
            "name": args.group(), "key": key, "partition": number, "count": count, "assigned": assigned, "owner": owner,
            "moving": moving,
        });
        output::line(&line.to_string())?;
    } else {
        let owner = partition.map_or("no owner".into(), owner);
        output::line(&format!("partition {number} of {count}: {owner}"))?;
    }
    Ok(OK)
}

fn none(args: &PartitionsArgs) -> Result<i32, ExitFailure> {
    if args.job.common.json {
        let line = json!({ "name": args.group(), "count": null, "members": [], "partitions": [] });
        output::line(&line.to_string())?;
    } else {
        output::line(&format!("no member has joined the group {}", quoted(args.group().as_str())))?;
    }
    Ok(OK)
}

fn table(args: &PartitionsArgs, status: &GroupStatus) -> Result<i32, ExitFailure> {
    if args.job.common.json {
        let mut object = json!(status);
        object["name"] = json!(args.group());
        output::line(&object.to_string())?;
        return Ok(OK);
    }
    let (name, count, members) = (quoted(args.group().as_str()), status.count, status.members.len());
    let moving = status.moving().count();
    output::line(&format!("group {name}: {count} partitions, {members} members, {moving} moving"))?;
    let mut rows = vec![["MEMBER", "PROCESS", "WEIGHT", "OWNS", "JOINED"].map(String::from).to_vec()];
    for member in &status.members {
        let leaving = if member.leaving { ", leaving" } else { "" };
        rows.push(vec![
            format!("{}{leaving}", plain(&member.name)),
            format!("{}, pid {}", plain(&member.host), member.pid),
            member.weight.to_string(),
            format!("{} of {}", member.owned, member.assigned),
            format!("{} ago", text::ago(member.since)),
        ]);
    }
    print_rows(&rows)?;
    let mut rows =
        vec![["PARTITION", "OWNER", "FENCE", "OWNED FOR", "EXPIRES IN"].map(String::from).to_vec()];
    rows.extend(status.partitions.iter().map(row));
    print_rows(&rows)?;
    Ok(OK)
}

fn print_rows(rows: &[Vec<String>]) -> Result<(), ExitFailure> {
    for (i, line) in columns(rows).iter().enumerate() {
        output::line(&if i == 0 { bold(line) } else { line.clone() })?;
    }
    Ok(())
}

fn row(partition: &PartitionStatus) -> Vec<String> {
    let mut row = vec![partition.number.to_string(), owner(partition)];
    row.extend(match &partition.owner {
        Some(owner) => [
            owner.fence.to_string(),
            text::ago(owner.since),
            duration::rough(Duration::from_millis(owner.expires_in_ms)),
        ],
        None => ["-", "-", "-"].map(String::from),
    });
    row
}

/// `w1`, or `w1, moving to w2`.
fn owner(partition: &PartitionStatus) -> String {
    let owner = partition.owner.as_ref().map(|owner| plain(&owner.member).into_owned());
    let owner = owner.unwrap_or_else(|| "(free)".into());
    match &partition.assigned {
        Some(next) if partition.moving => format!("{owner}, moving to {}", plain(next)),
        _ => owner,
    }
}
