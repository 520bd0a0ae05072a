//! A test that is killed has no chance to clean up; the next run of it does.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use lab_tests::Case;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

const HOST: &str = "hv2";
const CASE: &str = "victim";
/// Set for the process that is to be killed.
const VICTIM: &str = "KVM2_TEST_TO_BE_KILLED";
const MADE: &str = "everything is made";

#[test]
fn what_a_killed_test_left_on_a_host_is_gone_when_it_runs_again() {
    if std::env::var_os(VICTIM).is_some() {
        return victim();
    }
    let Some(case) = Case::start(CASE, &[HOST]) else { return };
    let mut child = Command::new(std::env::current_exe().expect("a test knows its own path"))
        .args(["--exact", "killed::what_a_killed_test_left_on_a_host_is_gone_when_it_runs_again", "--nocapture"])
        .env(VICTIM, "1")
        // what it leaves there goes with this one
        .env("TMPDIR", case.dir())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // with the daemon that it starts
        .process_group(0)
        .spawn()
        .expect("starting this program again");
    let made = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok).any(|line| line.contains(MADE));
    killpg(Pid::from_raw(i32::try_from(child.id()).expect("a pid fits")), Signal::SIGKILL).expect("killing a child");
    child.wait().expect("waiting for a child");
    assert!(made, "the test to be killed came to nothing");
    assert_eq!((case.left(HOST).len(), case.bases(HOST).len()), (6, 3), "it left much: {:?}", case.left(HOST));

    // the next run sweeps as it starts
    let next = Case::start(CASE, &[HOST]).expect("the lab is there");
    assert_eq!(next.left(HOST), Vec::<String>::new());
    assert_eq!(next.bases(HOST), Vec::<String>::new());
}

/// Makes what is hard to remove, says so, and waits to be killed.
#[tokio::main]
async fn victim() {
    let case = Case::start(CASE, &[HOST]).expect("the lab is there");
    let daemon = case.daemon(case.entry().image_set("tiny", "firmware", "uefi")).await;
    let host = case.host(HOST);
    let [running, saved] = ["running", "saved"].map(|n| case.vm(n));
    for vm in [&running, &saved] {
        daemon.clients().create(case.request(vm, HOST)).await.expect("created");
    }
    host.virsh(&["checkpoint-create-as", &saved, "c1", "--diskspec", "vda,checkpoint=bitmap", "--diskspec", "vdb,checkpoint=no"]);
    host.virsh(&["managedsave", &saved]);
    println!("{MADE}");
    std::future::pending::<()>().await;
}
