//! `config check`: what a providers file configures, or every fault it has.

use std::path::Path;

use super::{Failure, compose, output};
use crate::config;

pub(super) fn run(file: &Path) -> Result<(), Failure> {
    let (config, notes) = compose::load(file)?;
    output::line(config::describe(&config));
    for note in notes {
        output::line(format_args!("note: {note}"));
    }
    Ok(())
}
