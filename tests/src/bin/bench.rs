//! The benchmark; `tests/bench` builds what it needs, brings the lab up and runs it.
//!
//! usage: bench [--rounds N] [NAME...]
//!
//! Names: startup cold-link warm-create listing image memory; none means all. Prints
//! medians with their spread and says which limits were kept; a limit that was missed
//! is a finding, not a failure of the program.

use std::process::ExitCode;

use lab_tests::bench::{Figure, Rig, cold_link, image, listing, memory, startup, warm_create};

const NAMES: [&str; 6] = ["startup", "cold-link", "warm-create", "listing", "image", "memory"];
const ROUNDS: usize = 7;

fn main() -> ExitCode {
    let (mut rounds, mut names) = (ROUNDS, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rounds" => match args.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0) {
                Some(n) => rounds = n,
                None => return usage(),
            },
            name if NAMES.contains(&name) => names.push(name.to_owned()),
            _ => return usage(),
        }
    }
    let Some(rig) = Rig::set_up(rounds) else { return ExitCode::FAILURE };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let (mut judged, mut kept) = (0, 0);
    for name in NAMES {
        if !names.is_empty() && !names.iter().any(|wanted| wanted == name) {
            continue;
        }
        for figure in runtime.block_on(measure(name, &rig)) {
            println!("{figure}");
            let (all, good) = figure.kept();
            judged += all;
            kept += good;
        }
    }
    println!("{kept} of {judged} limits kept");
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: bench [--rounds N] [NAME...]\nnames: {}", NAMES.join(" "));
    ExitCode::from(2)
}

async fn measure(name: &str, rig: &Rig) -> Vec<Figure> {
    match name {
        "startup" => vec![startup::measure(rig).await],
        "cold-link" => vec![cold_link::measure(rig).await],
        "warm-create" => warm_create::measure(rig).await,
        "listing" => vec![listing::measure(rig).await],
        "image" => vec![image::measure(rig).await],
        _ => vec![memory::measure(rig).await],
    }
}
