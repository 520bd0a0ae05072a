//! Hands the command line to the library and its outcome to the system.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "failpoints")]
    provider_kvm2::failpoint::from_environment();
    // one provider of cryptography for SSH, TLS and HTTPS; a second install is refused, and there is none
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    provider_kvm2::cli::run(std::env::args_os()).into()
}
