//! The command line: the daemon and its client in one program.
//!
//! `serve` runs the daemon and is the default. The other verbs speak the contract
//! to a running one, this or any other provider. Results go to stdout, everything
//! else to stderr; the exit code tells a script what kind of failure it was.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub mod client;
mod compose;
mod config_check;
mod create;
mod exit;
mod harden;
mod output;
mod progress;
pub mod serve;
mod verbs;

pub use exit::{Exit, Failure};

/// Where daemon and client meet unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/kvm2-providerd/kvm2-providerd.sock";

const AFTER_HELP: &str = "\
Exit codes of the client verbs:
  0  done
  1  any other failure
  2  the command line is wrong
  3  no such instance or image (NotFound)
  4  repeating does not help until request, host, image or configuration change (Permanent)
  5  repeat the command later (Transient)
  6  a resource of the host is used up (QuotaExceeded)

Examples:
  kvm2-providerd config check /etc/kvm2/providers.yaml
  kvm2-providerd serve --config /etc/kvm2/providers.yaml
  kvm2-providerd check
  kvm2-providerd create web-1 --machine-type small --image debian-13 --user-data cloud-init.yaml --wait
  kvm2-providerd list --output json
  kvm2-providerd delete web-1
";

/// Virtual machines on plain libvirt hosts over SSH, behind the egress proxy provider contract.
///
/// Without a verb it serves.
#[derive(Debug, Parser)]
#[command(name = "kvm2-providerd", version, after_help = AFTER_HELP, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the daemon (the default).
    Serve(Box<serve::ServeArgs>),
    /// Make an instance, or find it made; with --wait until it has an address.
    Create(create::CreateArgs),
    /// Show one instance.
    Get(verbs::GetArgs),
    /// Remove an instance and everything that was made for it.
    Delete(verbs::DeleteArgs),
    /// Show all instances, and volumes that were left behind.
    List(verbs::ListArgs),
    /// Try every host; fails unless all can run instances.
    Check(verbs::CheckArgs),
    /// Show what the provider is and is configured with.
    Info(verbs::InfoArgs),
    /// Show the images that the hosts have cached or are pulling.
    Images(verbs::ImagesArgs),
    /// Look at a providers file without serving it.
    Config {
        #[command(subcommand)]
        verb: ConfigVerb,
    },
}

#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Report every fault of the file, or what it configures.
    Check {
        /// The providers file.
        file: PathBuf,
    },
}

/// What every client verb takes.
#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// Unix socket of the daemon, or http://HOST:PORT, or https://HOST:PORT with --tls-*.
    #[arg(long, env = "KVM2_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH|URL")]
    pub socket: String,
    /// CA that signed the daemon's certificate (PEM).
    #[arg(long, env = "KVM2_CLIENT_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Our own certificate (PEM).
    #[arg(long, env = "KVM2_CLIENT_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of our own certificate (PEM).
    #[arg(long, env = "KVM2_CLIENT_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Provider entry; may be left out where only one is configured.
    #[arg(long, env = "KVM2_ENTRY", default_value = "", hide_default_value = true)]
    pub entry: String,
    /// How results are shown.
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs: the message of the contract, in protobuf's JSON names.
    Json,
}

/// Parses the command line of the process. An argument list without a verb is that of `serve`.
pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(with_verb(arguments.collect()))
}

fn with_verb(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let for_help = |a: &OsString| matches!(a.to_str(), Some("-h" | "--help" | "-V" | "--version"));
    let lacks_verb = match arguments.get(1) {
        None => true,
        Some(first) => first.to_str().is_some_and(|a| a.starts_with('-')) && !for_help(first),
    };
    if lacks_verb {
        arguments.insert(1.min(arguments.len()), "serve".into());
    }
    arguments
}

/// Runs what the command line asks for and says how it ended.
pub fn run(arguments: impl Iterator<Item = OsString>) -> Exit {
    let cli = match parse(arguments) {
        Ok(cli) => cli,
        Err(e) => {
            // help and version are no failures; where nobody can read them there is nobody to tell
            let _ = e.print();
            return if e.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let ended = match cli.verb {
        Verb::Serve(args) => serve::run(*args),
        Verb::Config { verb: ConfigVerb::Check { file } } => config_check::run(&file),
        Verb::Create(args) => client::run(create::run(args)),
        Verb::Get(args) => client::run(verbs::get(args)),
        Verb::Delete(args) => client::run(verbs::delete(args)),
        Verb::List(args) => client::run(verbs::list(args)),
        Verb::Check(args) => client::run(verbs::check(args)),
        Verb::Info(args) => client::run(verbs::info(args)),
        Verb::Images(args) => client::run(verbs::images(args)),
    };
    match ended {
        Ok(()) => Exit::Done,
        Err(failure) => {
            // as for stdout: whoever closed stderr does not read it
            let _ = write!(std::io::stderr(), "{failure}");
            failure.exit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb_of(line: &str) -> Result<Verb, clap::Error> {
        parse(line.split(' ').map(OsString::from)).map(|cli| cli.verb)
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn without_a_verb_it_serves() {
        assert!(matches!(verb_of("kvm2-providerd --config /c.yaml"), Ok(Verb::Serve(_))));
        assert!(matches!(verb_of("kvm2-providerd serve --config /c.yaml"), Ok(Verb::Serve(_))));
        assert!(matches!(verb_of("kvm2-providerd list"), Ok(Verb::List(_))));
    }

    #[test]
    fn help_is_that_of_the_program_and_lists_verbs_and_exit_codes() {
        let e = verb_of("kvm2-providerd --help").expect_err("help ends parsing");
        let text = e.to_string();
        for word in ["create", "delete", "images", "Exit codes", "QuotaExceeded"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!e.use_stderr());
    }

    #[test]
    fn tcp_needs_tls_or_the_word_insecure() {
        for line in [
            "kvm2-providerd --config /c --listen 127.0.0.1:1",
            "kvm2-providerd --config /c --listen 127.0.0.1:1 --tls-cert /a",
            "kvm2-providerd --config /c --listen 127.0.0.1:1 --tls-cert /a --tls-key /b",
        ] {
            assert!(verb_of(line).is_err(), "{line}");
        }
        assert!(verb_of("kvm2-providerd --config /c --listen 127.0.0.1:1 --insecure-loopback").is_ok());
        assert!(verb_of("kvm2-providerd --config /c --listen 0.0.0.0:1 --tls-cert /a --tls-key /b --tls-client-ca /c").is_ok());
    }
}
