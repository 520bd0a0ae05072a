//! A Create whose domain or volumes somebody takes away while it stands between two of its steps.

use std::path::Path;
use std::time::Duration;

use egress_provider_proto::v1::{CreateResponse, ErrorReason as Reason, create_response};
use lab_tests::case::uid_of;
use lab_tests::{Case, Clients, Daemon, Hold, Refusal, eventually, failpoints};
use tokio::task::JoinHandle;
use tonic::Status;

const HOST: &str = "hv2";
/// Only tells what is stuck.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon with a Create in it that stops at `points`, in their order.
struct Standing {
    daemon: Daemon,
    points: Vec<(String, Hold)>,
    create: JoinHandle<Result<CreateResponse, Status>>,
}

impl Standing {
    async fn at(case: &Case, program: &Path, vm: &str, points: &[&str]) -> Self {
        let points: Vec<_> = points.iter().map(|point| ((*point).to_owned(), Hold::new(case.dir(), point))).collect();
        let all: Vec<_> = points.iter().map(|(point, hold)| hold.at(point)).collect();
        let daemon = case.failing_daemon_in(&format!("standing-{vm}"), case.entry(), program, all.join(";")).await;
        let (clients, request) = (daemon.clients(), case.request(vm, HOST));
        let create = tokio::spawn(async move { clients.create(request).await });
        let standing = Self { daemon, points, create };
        standing.reached(0).await;
        standing
    }

    async fn reached(&self, n: usize) {
        let point = &self.points[n].0;
        eventually(&format!("the Create stands at {point}"), LIMIT, || async {
            let says = self.daemon.log().lines().any(|line| line.contains("failpoint reached") && line.contains(point));
            if says { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
    }

    async fn goes_on_to(&self, n: usize) {
        self.points[n - 1].1.let_go();
        self.reached(n).await;
    }

    async fn ends(self) -> (Daemon, Result<CreateResponse, Status>) {
        self.points.iter().for_each(|(_, hold)| hold.let_go());
        let answer = tokio::time::timeout(LIMIT, self.create).await.expect("an answer").expect("the caller");
        (self.daemon, answer)
    }
}

fn reason<T: std::fmt::Debug>(answer: Result<T, Status>) -> Reason {
    Refusal::of(&answer.expect_err("refused")).reason
}

async fn deleted_by(clients: &Clients, case: &Case, vm: &str) {
    clients.delete_by_key(vm, &uid_of(vm)).await.expect("deleted");
    assert!(case.left(HOST).iter().all(|name| !name.starts_with(vm)), "{:?}", case.left(HOST));
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_another_create_is_about_to_take_back_are_waited_for() {
    let Some(case) = Case::start("takenback", &[HOST]) else { return };
    let Some(program) = failpoints::binary("volumes_that_another_create_is_about_to_take_back") else { return };
    let other = case.daemon(case.entry()).await;
    let clients = other.clients();
    clients.create(case.request(&case.vm("warm"), HOST)).await.expect("the base is there");
    // where the other daemon's Delete comes, and where its Create meets what was made after that
    for (n, places) in
        [["create.before_overlay", "create.before_seed"], ["create.before_overlay", "create.before_start"]].iter().enumerate()
    {
        let vm = case.vm(&n.to_string());
        let standing = Standing::at(&case, &program, &vm, places).await;
        deleted_by(&clients, &case, &vm).await;
        standing.goes_on_to(1).await;
        assert_eq!(reason(clients.create(case.request(&vm, HOST)).await), Reason::OperationInProgress, "{places:?}");
        let (_daemon, answer) = standing.ends().await;
        assert_eq!(reason(answer), Reason::StateChanged, "{places:?}");
        assert!(case.left(HOST).iter().all(|name| !name.starts_with(&vm)), "{places:?}: {:?}", case.left(HOST));
        let created = clients.create(case.request(&vm, HOST)).await.expect("the name is free");
        assert_eq!(created.outcome(), create_response::Outcome::Created);
        deleted_by(&clients, &case, &vm).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_whose_volume_was_taken_before_its_start_is_asked_to_come_again() {
    let Some(case) = Case::start("taken", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_create_whose_volume_was_taken_before_its_start") else { return };
    let host = case.host(HOST);
    for (name, volume) in [("disk", ".qcow2"), ("seed", "-seed.iso")] {
        let vm = case.vm(name);
        let standing = Standing::at(&case, &program, &vm, &["create.before_start"]).await;
        host.virsh(&["vol-delete", &format!("{vm}{volume}"), "--pool", "default"]);
        let (daemon, answer) = standing.ends().await;
        assert_eq!(reason(answer), Reason::StateChanged, "{name}");
        let created = daemon.clients().create(case.request(&vm, HOST)).await.expect("the next makes it whole");
        assert_eq!(created.outcome(), create_response::Outcome::Created, "{name}");
        deleted_by(&daemon.clients(), &case, &vm).await;
    }
}
