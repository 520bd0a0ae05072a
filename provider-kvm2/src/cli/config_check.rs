//! `config check`: what a providers file configures, or every fault it has.

use std::path::Path;

use super::{Failure, compose};
use crate::config;

pub(super) fn run(file: &Path) -> Result<(), Failure> {
    let (config, notes) = compose::load(file)?;
    println!("{}", config::describe(&config));
    for note in notes {
        println!("note: {note}");
    }
    Ok(())
}
