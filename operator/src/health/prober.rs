//! Probes everything that the board wants, each in its interval: one queue and a bounded number of probes at a time, so
//! that thousands of proxies need no thread of their own.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;

use super::board::{Board, Target};
use super::probe::{Finding, ProbeOptions, probe};
use super::thresholds::Thresholds;
use crate::backoff::spread;
use crate::metrics::Metrics;

/// How often and how many.
#[derive(Debug, Clone)]
pub struct ProberOptions {
    /// Each probe.
    pub probe: ProbeOptions,
    /// Between two probes of a proxy.
    pub interval: Duration,
    /// Between two probes of a proxy that has no verdict yet, or whose verdict is in doubt.
    pub in_doubt: Duration,
    /// How many make a verdict.
    pub thresholds: Thresholds,
    /// At a time.
    pub most: usize,
}

/// The prober.
#[derive(Debug)]
pub struct Prober {
    board: Arc<Board>,
    options: Arc<ProberOptions>,
    metrics: Arc<Metrics>,
}

impl Prober {
    /// Of a board.
    #[must_use]
    pub fn new(board: Arc<Board>, options: ProberOptions, metrics: Arc<Metrics>) -> Self {
        Self { board, options: Arc::new(options), metrics }
    }

    /// Probes until it is stopped; every probe has ended when it returns.
    pub async fn run(self, stop: CancellationToken) {
        let mut due: DelayQueue<Target> = DelayQueue::new();
        let turns = Arc::new(Semaphore::new(self.options.most.max(1)));
        let mut running: JoinSet<Option<(Target, Duration)>> = JoinSet::new();
        loop {
            // with a full house nothing more is started; what is due waits in the queue
            let may_start = turns.available_permits() > 0;
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.board.changed() => {}
                Some(expired) = due.next(), if may_start && !due.is_empty() => {
                    let target = expired.into_inner();
                    if self.board.is_wanted(&target) && let Ok(turn) = turns.clone().try_acquire_owned() {
                        let (board, options, metrics) = (self.board.clone(), self.options.clone(), self.metrics.clone());
                        running.spawn(async move {
                            let finding = probe(&target.at.0, target.at.1, &options.probe).await;
                            drop(turn);
                            metrics.probed(finding.reason());
                            let again = settle(&board, &target, &finding, &options)?;
                            Some((target, again))
                        });
                    }
                }
                Some(done) = running.join_next(), if !running.is_empty() => {
                    if let Ok(Some((target, again))) = done {
                        due.insert(target, spread(again, rand::random()));
                    }
                }
            }
            for target in self.board.take_new() {
                // thousands that come with a restart are not probed in one moment
                let first = self.options.in_doubt.mul_f64(rand::random::<f64>() * 0.5);
                due.insert(target, first);
            }
        }
        running.shutdown().await;
    }
}

/// Notes a finding; when to probe again, or None if the target is not wanted any more.
fn settle(board: &Board, target: &Target, finding: &Finding, options: &ProberOptions) -> Option<Duration> {
    let (before, after) = board.note(target, finding, options.thresholds)?;
    if before != after
        && let Some(healthy) = after
    {
        tracing::info!(proxy = target.proxy, healthy, reason = finding.reason(), "the verdict of a proxy has changed");
    }
    Some(if after == Some(finding.is_good()) { options.interval } else { options.in_doubt })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::sync::Barrier;

    use super::*;

    fn options(most: usize) -> ProberOptions {
        ProberOptions {
            probe: ProbeOptions { target: "example.org:443".into(), canary: None, timeout: Duration::from_secs(20) },
            interval: Duration::from_millis(20),
            in_doubt: Duration::from_millis(10),
            thresholds: Thresholds { rise: 2, fall: 2 },
            most,
        }
    }

    #[tokio::test]
    async fn many_proxies_are_probed_a_few_at_a_time_until_each_has_its_verdict() {
        const MOST: usize = 4;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (open, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let server = tokio::spawn({
            let (open, peak, full) = (open, peak.clone(), Arc::new(Barrier::new(MOST)));
            async move {
                let mut answers = JoinSet::new();
                while let Ok((mut stream, _)) = listener.accept().await {
                    peak.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let (open, full) = (open.clone(), full.clone());
                    answers.spawn(async move {
                        let _ = stream.read(&mut [0; 512]).await;
                        // so many there have to be, and one more has every chance to come
                        full.wait().await;
                        for _ in 0..1000 {
                            tokio::task::yield_now().await;
                        }
                        open.fetch_sub(1, Ordering::SeqCst);
                        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                    });
                }
            }
        });
        let (board, mut names) = Board::new();
        let board = Arc::new(board);
        for n in 0..50 {
            board.want(&format!("ns/p{n}"), Some(("127.0.0.1".into(), port)));
        }
        let stop = CancellationToken::new();
        let prober = tokio::spawn(Prober::new(board.clone(), options(MOST), Arc::default()).run(stop.clone()));
        let all = async {
            while (0..50).any(|n| board.health(&format!("ns/p{n}")).and_then(|h| h.healthy) != Some(true)) {
                names.recv().await.expect("a verdict");
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all).await.expect("each has its verdict, and none is forgotten");
        stop.cancel();
        prober.await.expect("it ends");
        server.abort();
        assert_eq!(peak.load(Ordering::SeqCst), MOST);
    }
}
