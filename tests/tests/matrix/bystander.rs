//! Somebody else's calls on the link that a matrix makes trouble on.

use lab_tests::case::uid_of;
use lab_tests::{Clients, Outcome};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Reads one VM over and over, and notes each failure.
pub(crate) struct Bystander {
    stop: oneshot::Sender<()>,
    task: JoinHandle<(usize, Vec<String>)>,
}

impl Bystander {
    pub(crate) fn of(clients: Clients, host: &'static str, vm: String) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let (mut calls, mut failures) = (0, Vec::new());
            while stopped.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
                if let Err(e) = clients.get(&format!("hosts/{host}/domains/{vm}"), &uid_of(&vm)).await {
                    failures.push(format!("a bystander's Get: {}", e.message()));
                }
                calls += 1;
            }
            (calls, failures)
        });
        Self { stop, task }
    }

    pub(crate) async fn close(self, outcome: &mut Outcome) {
        let _ = self.stop.send(());
        let (calls, failures) = self.task.await.expect("the bystander's task");
        outcome.wrong.extend(failures);
        if calls == 0 {
            outcome.wrong.push("the bystander got no call through".to_owned());
        }
    }
}
