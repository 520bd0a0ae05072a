//! Named places between two steps where a test makes the daemon fail on purpose.
//!
//! Only in builds with the feature `failpoints`; without it `failpoint!` is nothing, not even its name. Such a build
//! reads `FAILPOINTS` once at its start, `name=action;name=action`, with the actions of the crate `fail`:
//! `sleep(MS)`, `off`, counts as in `2*off->return(abort)`, and `return(WHAT)`, where WHAT is
//!
//! - `error`: the step fails with a Transient error of its own;
//! - `link-lost`: the step fails as if the link to the host had ended;
//! - `panic`: the task panics there;
//! - `abort`: the process is gone at once, as after `kill -9`;
//! - `exit`: the process ends with code 70, its destructors and exit handlers run;
//! - `hold:FILE`: the step does not go on for as long as the file exists;
//! - `from:DIR`: what the file DIR/NAME says, nothing without one. It is taken away by that, so it counts once: a test
//!   tries one place after the other in one daemon.
//!
//! Names are `operation.step`. Tests find them in the sources, so a new place is in every matrix at once.

/// The step fails here, hangs here or dies here if a test says so. The second form turns the
/// [`ProviderError`](crate::error::ProviderError) into the error of the surrounding function.
#[cfg(feature = "failpoints")]
macro_rules! failpoint {
    ($name:literal) => {
        $crate::failpoint::reach($name).await?
    };
    ($name:literal, $wrap:path) => {
        $crate::failpoint::reach($name).await.map_err($wrap)?
    };
}

#[cfg(not(feature = "failpoints"))]
macro_rules! failpoint {
    ($name:literal $(, $wrap:path)?) => {};
}

#[cfg(feature = "failpoints")]
pub use configured::from_environment;
#[cfg(feature = "failpoints")]
pub(crate) use configured::reach;

#[cfg(feature = "failpoints")]
mod configured {
    use std::path::Path;
    use std::sync::{Arc, LazyLock};
    use std::time::Duration;

    use fail_parallel::{FailPointRegistry, FailScenario, eval_async};

    use crate::error::{ProviderError, Reason, Result};

    static REGISTRY: LazyLock<Arc<FailPointRegistry>> = LazyLock::new(|| Arc::new(FailPointRegistry::new()));

    /// Takes over `FAILPOINTS`. Panics on what it does not understand: such a test would test nothing.
    pub fn from_environment() {
        // dropping it would switch all of them off
        std::mem::forget(FailScenario::setup(REGISTRY.clone()));
    }

    pub(crate) async fn reach(name: &'static str) -> Result<()> {
        let Some(mut action) = eval_async(REGISTRY.clone(), name, Option::unwrap_or_default).await else { return Ok(()) };
        if let Some(dir) = action.strip_prefix("from:") {
            let Some(once) = taken(&Path::new(dir).join(name)) else { return Ok(()) };
            action = once;
        }
        tracing::warn!(failpoint = name, action, "failpoint reached");
        match action.as_str() {
            "abort" => std::process::abort(),
            "exit" => end_process(),
            "panic" => panic!("failpoint {name} panics"),
            "link-lost" => Err(ProviderError::new(Reason::LinkLost, format!("failpoint {name} took the link away"))),
            "" | "error" => Err(ProviderError::new(Reason::Internal, format!("failpoint {name} failed the step"))),
            other => {
                if let Some(file) = other.strip_prefix("hold:") {
                    while Path::new(file).exists() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    return Ok(());
                }
                Err(ProviderError::new(Reason::Internal, format!("failpoint {name} has no action {other}")))
            }
        }
    }

    /// The content of a file that is there, for the first that asks.
    fn taken(file: &Path) -> Option<String> {
        let own = file.with_extension(format!("taken-{}", rand::random::<u64>()));
        std::fs::rename(file, &own).ok()?;
        let text = std::fs::read_to_string(&own).ok();
        // it has another name already
        let _ = std::fs::remove_file(&own);
        text
    }

    #[expect(clippy::exit, reason = "what is asked for: an end that no caller of this place sees coming")]
    fn end_process() -> ! {
        std::process::exit(70)
    }
}
