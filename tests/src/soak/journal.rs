//! Every step as it began and as it ended, a line each. A file of it can be run again.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::plan::{Actor, Step};

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Seed(u64),
    Began { number: u64, at_ms: u64, actor: Actor, step: Step },
    Ended { number: u64, at_ms: u64, said: String },
}

#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    state: Mutex<(File, u64)>,
}

impl Journal {
    pub fn create(path: &Path, seed: u64) -> Self {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).expect("making the journal's directory");
        }
        let file = File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let journal = Self { path: path.to_owned(), state: Mutex::new((file, 0)) };
        write(&mut journal.lock().0, &Line::Seed(seed));
        journal
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (File, u64)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number that the step is known by.
    pub fn began(&self, at_ms: u64, actor: Actor, step: &Step) -> u64 {
        let mut state = self.lock();
        state.1 += 1;
        let number = state.1;
        write(&mut state.0, &Line::Began { number, at_ms, actor, step: step.clone() });
        number
    }

    pub fn ended(&self, number: u64, at_ms: u64, said: &str) {
        write(&mut self.lock().0, &Line::Ended { number, at_ms, said: said.to_owned() });
    }
}

fn write(file: &mut File, line: &Line) {
    let mut text = serde_json::to_string(line).expect("a line is plain values");
    text.push('\n');
    file.write_all(text.as_bytes()).expect("writing the journal");
}

/// The steps of a journal, to be begun in the same order.
#[derive(Debug)]
pub struct Replay {
    pub seed: u64,
    steps: HashMap<Actor, Vec<(u64, Step)>>,
    turn: watch::Sender<u64>,
}

impl Replay {
    pub fn read(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let (mut seed, mut steps, mut turns) = (None, HashMap::<_, Vec<_>>::new(), 0);
        for line in BufReader::new(file).lines() {
            let line = line.map_err(|e| format!("{}: {e}", path.display()))?;
            match serde_json::from_str(&line).map_err(|e| format!("{}: {e} in {line}", path.display()))? {
                Line::Seed(was) => seed = Some(was),
                // counted anew: lines may have been taken out
                Line::Began { actor, step, .. } => {
                    steps.entry(actor).or_default().push((turns, step));
                    turns += 1;
                }
                Line::Ended { .. } => {}
            }
        }
        let seed = seed.ok_or_else(|| format!("{} names no seed", path.display()))?;
        Ok(Self { seed, steps, turn: watch::Sender::new(0) })
    }

    pub fn steps_of(&self, actor: Actor) -> Vec<(u64, Step)> {
        self.steps.get(&actor).cloned().unwrap_or_default()
    }

    /// Waits until every step that began before this one has begun.
    pub async fn wait_for(&self, turn: u64) {
        // the sender lives as long as self
        let _ = self.turn.subscribe().wait_for(|now| *now >= turn).await;
    }

    pub fn next_turn(&self, turn: u64) {
        self.turn.send_replace(turn + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::plan::Plan;

    #[test]
    fn what_was_written_is_read_as_the_same_steps() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("j");
        let journal = Journal::create(&path, 9);
        let (here, there) = (Actor::Caller(0), Actor::Host(1));
        let steps: Vec<_> = Plan::of(9, here).take(2).collect();
        let other = Plan::of(9, there).next().expect("endless");
        journal.began(1, here, &steps[0]);
        let number = journal.began(2, there, &other);
        journal.ended(number, 3, "mended");
        journal.began(4, here, &steps[1]);
        let replay = Replay::read(&path).expect("a journal");
        assert_eq!(replay.seed, 9);
        assert_eq!(replay.steps_of(here), [(0, steps[0].clone()), (2, steps[1].clone())]);
        assert_eq!(replay.steps_of(there), [(1, other)]);
        assert_eq!(replay.steps_of(Actor::Images), []);
    }
}
