//! A short soak of a fixed plan, so that the long one never rots. `tests/soak` is the long one.

use std::time::Duration;

use lab_tests::soak::{Options, run};

#[tokio::test(flavor = "multi_thread")]
async fn a_short_soak_loses_leaks_and_sticks_at_nothing() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = Options { seed: 1, length: Duration::from_secs(35), replay: None, journal: dir.path().join("journal") };
    let Some(report) = run(&options).await.expect("a soak") else { return };
    assert!(report.is_good(), "{report}");
    let (calls, faults) = (report.calls.values().sum::<usize>(), report.faults.values().sum::<usize>());
    assert!(calls > 40 && faults > 5, "{report}");
}
