//! What a soak did and found, as a table.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::reasons::Failed;

/// Lines of a daemon's log that are shown for one finding.
const SHOWN: usize = 40;
/// Findings that are shown with all that belongs to them; the others are only counted.
const FINDINGS: usize = 12;

/// A part of a daemon's log.
#[derive(Debug, Clone)]
pub struct Excerpt {
    pub log: PathBuf,
    pub from: u64,
    pub until: u64,
    /// Only lines with one of these.
    pub about: Vec<String>,
}

/// Something that must not be.
#[derive(Debug, Clone)]
pub struct Finding {
    /// The step, as the journal counts them; None for what the end showed.
    pub step: Option<u64>,
    pub what: String,
    pub excerpts: Vec<Excerpt>,
}

/// A failed call, to be judged when all is known that went wrong meanwhile.
#[derive(Debug, Clone)]
pub struct Suspect {
    pub finding: Finding,
    pub failed: Failed,
    /// Milliseconds since the start.
    pub from: u64,
    pub until: u64,
}

#[derive(Debug, Default)]
pub struct Report {
    pub seed: u64,
    pub journal: PathBuf,
    /// Calls by kind and outcome.
    pub calls: BTreeMap<(String, String), usize>,
    pub faults: BTreeMap<String, usize>,
    pub unclassified: Vec<Finding>,
    pub violations: Vec<Finding>,
    pub leaks: Vec<Finding>,
    pub stuck: Vec<Finding>,
    /// What the soak itself could not do, so that its verdict is worth nothing.
    pub failures: Vec<Finding>,
    pub suspects: Vec<Suspect>,
    /// Figures at the start and at the end.
    pub figures: Vec<(String, u64, u64)>,
}

impl Finding {
    pub fn at_the_end(what: impl Into<String>) -> Self {
        Self { step: None, what: what.into(), excerpts: Vec::new() }
    }
}

impl Report {
    pub fn is_good(&self) -> bool {
        self.findings().iter().all(|(_, found)| found.is_empty())
    }

    pub fn count(&mut self, kind: &str, outcome: &str) {
        *self.calls.entry((kind.to_owned(), outcome.to_owned())).or_default() += 1;
    }

    fn findings(&self) -> [(&'static str, &[Finding]); 5] {
        [
            ("unclassified errors", &self.unclassified),
            ("violations of the model", &self.violations),
            ("leaks", &self.leaks),
            ("stuck", &self.stuck),
            ("failures of the soak", &self.failures),
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (title, found) in self.findings() {
            for finding in found.iter().take(FINDINGS) {
                writeln!(f, "{title}: {finding}")?;
            }
            if found.len() > FINDINGS {
                writeln!(f, "{title}: {} more", found.len() - FINDINGS)?;
            }
        }
        writeln!(f, "\ncalls")?;
        let mut last = "";
        for ((kind, outcome), n) in &self.calls {
            let shown = if kind == last { "" } else { kind };
            writeln!(f, "  {shown:<20} {n:>6}  {outcome}")?;
            last = kind;
        }
        writeln!(f, "faults")?;
        for (kind, n) in &self.faults {
            writeln!(f, "  {kind:<27} {n:>4}")?;
        }
        writeln!(f, "figures at the start and at the end")?;
        for (what, before, after) in &self.figures {
            writeln!(f, "  {what:<27} {before:>8} {after:>8}")?;
        }
        let calls: usize = self.calls.values().sum();
        writeln!(f, "\n{:<28} {}", "seed", self.seed)?;
        writeln!(f, "{:<28} {calls}", "calls")?;
        writeln!(f, "{:<28} {}", "faults", self.faults.values().sum::<usize>())?;
        for (title, found) in self.findings() {
            writeln!(f, "{title:<28} {}", found.len())?;
        }
        if !self.is_good() {
            let journal = self.journal.display();
            writeln!(f, "\nthe steps are in {journal}; the same plan: --seed {}, the same order: --replay {journal}", self.seed)?;
        }
        Ok(())
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Some(step) => write!(f, "step {step}: {}", self.what)?,
            None => write!(f, "{}", self.what)?,
        }
        for excerpt in &self.excerpts {
            for line in excerpt.lines() {
                write!(f, "\n    {line}")?;
            }
        }
        Ok(())
    }
}

impl Excerpt {
    /// The log has not ended yet: `until` is now.
    pub fn since(log: &Path, from: u64, about: Vec<String>) -> Self {
        Self { log: log.to_owned(), from, until: length(log), about }
    }

    fn lines(&self) -> Vec<String> {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(log.len());
        let part = String::from_utf8_lossy(&log[at(self.from)..at(self.until)]).into_owned();
        let lines: Vec<_> = part.lines().filter(|line| self.about.iter().any(|word| line.contains(word))).map(str::to_owned).collect();
        lines[lines.len().saturating_sub(SHOWN)..].to_vec()
    }
}

/// Bytes of a log so far.
pub fn length(log: &Path) -> u64 {
    std::fs::metadata(log).map_or(0, |meta| meta.len())
}
