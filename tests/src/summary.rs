//! What a matrix did, a line per try; `tests/matrix` adds them up.

use std::fs::File;
use std::io::Write as _;

/// File that lines are added to; set by `tests/matrix`.
const FILE: &str = "KVM2_MATRIX_SUMMARY";

/// How one try ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What is on the host and neither used nor listed.
    pub leaked: Vec<String>,
    /// What did not end within its time.
    pub stuck: Vec<String>,
    /// Any other promise that was not kept.
    pub wrong: Vec<String>,
}

impl Outcome {
    pub fn wrong(what: impl Into<String>) -> Self {
        Self { wrong: vec![what.into()], ..Self::default() }
    }

    pub fn is_good(&self) -> bool {
        *self == Self::default()
    }
}

/// The tries of one matrix.
#[derive(Debug)]
pub struct Summary {
    matrix: &'static str,
    tries: Vec<(String, Outcome)>,
}

impl Summary {
    pub fn of(matrix: &'static str) -> Self {
        Self { matrix, tries: Vec::new() }
    }

    pub fn add(&mut self, point: impl Into<String>, outcome: Outcome) {
        self.tries.push((point.into(), outcome));
    }

    /// Writes the lines down, then fails if any try was not good.
    #[track_caller]
    pub fn close(self) {
        if let Some(path) = std::env::var_os(FILE) {
            let mut file = File::options().create(true).append(true).open(path).expect("opening the summary");
            for (point, outcome) in &self.tries {
                let Outcome { leaked, stuck, wrong } = outcome;
                let converged = usize::from(outcome.is_good());
                // one write per line: other matrices write at the same time
                let line = format!("{}\t{point}\t{converged}\t{}\t{}\t{}\n", self.matrix, leaked.len(), stuck.len(), wrong.len());
                file.write_all(line.as_bytes()).expect("writing the summary");
            }
        }
        let bad: Vec<_> = self.tries.iter().filter(|(_, outcome)| !outcome.is_good()).map(|(point, o)| format!("{point}: {o:?}")).collect();
        assert!(!self.tries.is_empty(), "{}: nothing was tried", self.matrix);
        assert!(bad.is_empty(), "{}: {} of {} tries\n{}", self.matrix, bad.len(), self.tries.len(), bad.join("\n"));
    }
}

/// Whether every point is to be tried, and not only some that stand for the others.
pub fn is_full() -> bool {
    std::env::var("KVM2_MATRIX").is_ok_and(|size| size == "full")
}
