//! libFuzzer around the targets of the daemon; see docs/testing.md. `FUZZ_TARGET` names the target.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use provider_kvm2::fuzzing::Target;

static TARGET: OnceLock<&Target> = OnceLock::new();

fuzz_target!(|input: &[u8]| {
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names the target");
        provider_kvm2::fuzzing::find(&name).expect("FUZZ_TARGET is one of the targets")
    });
    (target.run)(input);
});
