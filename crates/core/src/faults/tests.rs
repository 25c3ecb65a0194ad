//! The table: the guarantees that follow from each column, and that every entry has an effect.

use std::time::Duration;

use super::*;
use crate::Guarantee::{Kept, Likely, No};

#[test]
fn the_guarantees_of_each_column_are_those_that_users_were_promised() {
    use Deployment::*;
    let promised = [
        (Memory, [Kept, Likely, No]),
        (Sqlite, [Kept, Kept, Kept]),
        (SqliteVolatile, [Kept, Likely, Likely]),
        (SqliteNetwork, [Likely, Likely, Likely]),
        (Postgres, [Likely, Kept, Kept]),
        (PostgresUnsynced, [Likely, Likely, Likely]),
        (PostgresNoFsync, [Likely, Likely, No]),
        (PostgresStandby, [Likely, Likely, Likely]),
        (RedisAlways, [Likely, Kept, Kept]),
        (RedisEverySecond, [Likely, Likely, Likely]),
        (RedisVolatile, [Likely, Likely, No]),
        (RedisReplicated, [Likely, Likely, Likely]),
        (RedisEvicting, [Likely, Likely, No]),
        (Redlock, [Likely, Likely, No]),
        (Etcd, [Kept, Kept, Kept]),
        (EtcdOld, [Likely, Kept, Kept]),
        (ZooKeeper, [Kept, Kept, Kept]),
        (ZooKeeperOld, [Likely, Kept, Likely]),
        (DynamoDb, [Kept, Kept, Kept]),
        (DynamoDbGlobal, [Likely, Likely, Likely]),
    ];
    assert_eq!(promised.map(|(deployment, _)| deployment), Deployment::ALL);
    for (deployment, [exclusion, fence, durable]) in promised {
        assert_eq!(Guarantees::of([deployment]), Guarantees { exclusion, fence, durable }, "{deployment:?}");
    }
}

#[test]
fn a_store_has_the_weaknesses_of_all_its_columns() {
    let both =
        Guarantees::of([Deployment::Postgres, Deployment::PostgresNoFsync, Deployment::PostgresStandby]);
    assert_eq!(both, Guarantees { exclusion: Likely, fence: Likely, durable: No });
    assert_eq!(Guarantees::of([]), Guarantees { exclusion: No, fence: No, durable: No });
}

#[test]
fn the_rows_are_numbered_from_1_to_22() {
    for (nth, fault) in FaultKind::ALL.into_iter().enumerate() {
        assert_eq!(usize::from(fault.number()), nth + 1);
        assert_eq!(FaultKind::of_number(fault.number()), Some(fault));
    }
    assert_eq!(FaultKind::of_number(0), None);
}

#[test]
fn a_fault_that_can_happen_has_a_bound_and_one_that_cannot_has_a_reason() {
    let second = Duration::from_secs(1);
    for deployment in Deployment::ALL {
        for fault in FaultKind::ALL {
            match deployment.cell(fault) {
                FaultCell::Declared(expected) => {
                    let longest = expected.wait.longest(deployment, second, second);
                    assert!(
                        longest >= second && longest < 6 * second,
                        "{deployment:?} {fault:?}: {longest:?}"
                    );
                }
                FaultCell::NotApplicable(why) => assert!(why.len() > 10, "{deployment:?} {fault:?}"),
            }
        }
    }
}
