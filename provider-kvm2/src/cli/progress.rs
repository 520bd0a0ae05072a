//! What a person sees while something takes its time: one moving line on a
//! terminal, else a plain line now and then. Always on stderr.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Between two plain lines about the same thing.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) enum Progress {
    Terminal(ProgressBar),
    Plain { step: &'static str, shown: Option<Instant> },
}

impl Progress {
    pub(super) fn start() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Plain { step: "", shown: None };
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self::Terminal(bar)
    }

    /// `step` names what is going on, `detail` how far it is.
    pub(super) fn show(&mut self, step: &'static str, detail: &str) {
        let text = if detail.is_empty() { step.to_owned() } else { format!("{step}: {detail}") };
        match self {
            Self::Terminal(bar) => bar.set_message(text),
            Self::Plain { step: last, shown } => {
                if *last != step || shown.is_none_or(|at| at.elapsed() >= PLAIN_INTERVAL) {
                    eprintln!("{text}");
                    (*last, *shown) = (step, Some(Instant::now()));
                }
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Self::Terminal(bar) = self {
            bar.finish_and_clear();
        }
    }
}
