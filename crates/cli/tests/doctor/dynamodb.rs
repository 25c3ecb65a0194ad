//! The doctor on DynamoDB, as moto plays it.
#![cfg(feature = "dynamodb")]

use crate::common::*;
use crate::tools::examine;

#[test]
fn a_missing_table_is_found_and_a_new_one_is_healthy() {
    let Ok(server) = lockkeeper_testkit::servers::moto() else { return };
    let place = Place::new("doctor_dynamodb");
    let url =
        format!("dynamodb://test:secret@eu-central-1/locks?endpoint=http://{}&timeout=20s", server.addr());
    let missing = examine(&place, &url);
    assert_eq!((missing.exit_code(), missing.standing("availability").as_str()), (2, "broken"));
    missing.has("harm", "lockkeeper store init");
    assert!(place.lk(["store", "init", &url]).output().unwrap().status.success());
    let report = examine(&place, &url);
    report.is_healthy_but(&[]).has("hint", "deletion protection");
    assert_eq!(report.exit_code(), 0);
}
