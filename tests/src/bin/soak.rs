//! The soak; `tests/soak` builds what it needs, brings the lab up and runs it.
//!
//! usage: soak [--minutes N] [--hour] [--seed S] [--replay FILE] [--journal FILE]
//!
//! Ends with 0 only when nothing was found.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lab_tests::soak::{Options, run};

const MINUTES: u64 = 10;

fn main() -> ExitCode {
    let (mut minutes, mut seed, mut replay, mut journal) = (MINUTES, None, None, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let good = match arg.as_str() {
            "--hour" => {
                minutes = 60;
                true
            }
            "--minutes" => args.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0).map(|n| minutes = n).is_some(),
            "--seed" => args.next().and_then(|n| n.parse().ok()).map(|n: u64| seed = Some(n)).is_some(),
            "--replay" => args.next().map(|path| replay = Some(PathBuf::from(path))).is_some(),
            "--journal" => args.next().map(|path| journal = Some(PathBuf::from(path))).is_some(),
            _ => false,
        };
        if !good {
            eprintln!("usage: soak [--minutes N] [--hour] [--seed S] [--replay FILE] [--journal FILE]");
            return ExitCode::from(2);
        }
    }
    // any number does; a short one is easier to type again
    let seed = seed.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs() % 1_000_000));
    let journal = journal.unwrap_or_else(|| std::env::temp_dir().join(format!("kvm2-soak-{seed}.journal")));
    let options = Options { seed, length: Duration::from_secs(minutes * 60), replay, journal };
    eprintln!("soak: seed {seed}, {minutes} minutes, journal {}", options.journal.display());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    match runtime.block_on(run(&options)) {
        Ok(Some(report)) => {
            print!("{report}");
            if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Ok(None) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("soak: {why}");
            ExitCode::FAILURE
        }
    }
}
