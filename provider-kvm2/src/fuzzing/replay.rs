//! Every input that is kept, and seeded mutations of it, through its target.

use std::panic::catch_unwind;
use std::path::PathBuf;

use rstest::rstest;

use super::mutate::Mutator;
use super::{TARGETS, find};

/// Bytes of mutations for each file; `KVM2_FUZZ_BYTES` asks for more.
const BYTES: usize = 8 << 10;
const SEED: u64 = 0x6b76_6d32;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus").join(target);
    let mut files: Vec<_> =
        std::fs::read_dir(&dir).expect("the corpus has a directory for each target").flatten().map(|f| f.path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(&path).expect("readable"))).collect()
}

#[rstest]
fn every_kept_input_and_its_mutations_keep_the_promises_of(
    #[values(
        "agent_reply",
        "capabilities_xml",
        "config",
        "domain_xml",
        "instance_id",
        "known_hosts",
        "mark",
        "origin",
        "pool_xml",
        "qcow2",
        "url_policy",
        "volume_xml"
    )]
    name: &str,
) {
    let target = find(name).expect("one of the targets");
    let seed = number("KVM2_FUZZ_SEED").unwrap_or(SEED);
    let bytes = number("KVM2_FUZZ_BYTES").map_or(BYTES, |n| n as usize);
    println!("{name}: KVM2_FUZZ_SEED={seed} KVM2_FUZZ_BYTES={bytes}");
    let files = corpus(name);
    assert!(!files.is_empty(), "no input of {name} is kept");
    let try_it = |what: String, input: &[u8]| {
        if catch_unwind(|| (target.run)(input)).is_err() {
            let kept = std::env::temp_dir().join(format!("{name}-{seed}.input"));
            let _ = std::fs::write(&kept, input);
            panic!("{name} breaks a promise for {what}; the input is in {}", kept.display());
        }
    };
    let mut tried = 0;
    for (i, (path, input)) in files.iter().enumerate() {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        try_it(file.to_string(), input);
        let mut mutator = Mutator::new(seed ^ (i as u64) << 32);
        // long files get fewer, short ones not endlessly many
        for n in 0..(bytes / input.len().max(1)).clamp(4, (bytes / 64).max(4)) {
            let other = &files[mutator.below(files.len())].1;
            try_it(format!("mutation {n} of {file}"), &mutator.mutate(input, other));
            tried += 1;
        }
    }
    println!("{name}: {} inputs kept, {tried} mutations", files.len());
}

#[test]
fn every_target_is_replayed_and_has_a_corpus() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
    let mut kept: Vec<String> =
        std::fs::read_dir(dir).expect("a corpus").flatten().map(|d| d.file_name().to_string_lossy().into_owned()).collect();
    kept.sort();
    let mut expected: Vec<&str> = TARGETS.iter().map(|target| target.name).chain(["libvirt_peer"]).collect();
    expected.sort();
    assert_eq!(kept, expected);
}

#[test]
fn the_same_seed_makes_the_same_inputs() {
    let some = |seed| (0..20).scan(Mutator::new(seed), |m, _| Some(m.mutate(b"some input", b"another"))).collect::<Vec<_>>();
    assert_eq!(some(1), some(1));
    assert_ne!(some(1), some(2));
}
