//! From the file and the environment to a [`Config`], or to all that is wrong with them.

use std::cell::RefCell;
use std::collections::HashSet;
use std::io::Read;
use std::path::Path as FilePath;
use std::sync::Arc;

use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::overrides::Override;
use super::raw::{Document, MAX_FILE_BYTES};
use super::reader::{Field, Reading};
use super::report::{Fault, Path, Place};
use super::schema::{BLOCK, ENTRY, ROOT};
use super::{Config, ConfigReport, Entry, entry, is_identifier};
use crate::error::bounded_to;

/// The type of entry that is served here, and the key of its block.
const TYPE: &str = "kvm2";

/// The configuration, and one line for each entry that is not served here.
pub fn load(path: &FilePath, env: impl IntoIterator<Item = (String, String)>) -> Result<(Config, Vec<String>), ConfigReport> {
    match read(path) {
        Ok(text) => parse(path, &text, env),
        Err(problem) => Err(ConfigReport::new(path, vec![file_fault(problem)])),
    }
}

fn file_fault(problem: String) -> Fault {
    Fault { place: Place::File { line: None }, path: Path::root(), value: None, problem }
}

fn read(path: &FilePath) -> Result<String, String> {
    let file = std::fs::File::open(path).map_err(|e| format!("cannot be opened: {e}"))?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("is larger than {MAX_FILE_BYTES} bytes; is this the providers file?"));
    }
    String::from_utf8(bytes).map_err(|e| format!("is not UTF-8 text (byte {})", e.utf8_error().valid_up_to()))
}

/// As [`load`], for a text that was read already; `path` only names it.
pub fn parse(path: &FilePath, text: &str, env: impl IntoIterator<Item = (String, String)>) -> Result<(Config, Vec<String>), ConfigReport> {
    let mut faults = Vec::new();
    let Some(document) = Document::parse(text, &mut faults) else {
        return Err(ConfigReport::new(path, faults));
    };
    let mut overrides: Vec<Override> = env.into_iter().filter_map(|(name, value)| Override::parse(&name, &value)).collect();
    let mut notes = Vec::new();
    let mut entries = Vec::new();

    let listing = Reading { document: &document, merged: None, faults: RefCell::new(Vec::new()) };
    let providers = listing.field(Path::root(), &document.root).block(ROOT).get("providers");
    let mut names = HashSet::new();
    let mut served = 0;
    let items = providers.items();
    for item in items.iter().flatten().cloned() {
        let Some(head) = head(item, &mut names, &mut notes) else { continue };
        served += 1;
        let (mine, others): (Vec<_>, Vec<_>) = overrides.drain(..).partition(|o| o.is_for(&head.name));
        overrides = others;
        if let Some(value) = head.settings.value().filter(|_| head.settings.is_set()) {
            let (entry, mut found) = entry(&document, &head, value, &mine);
            faults.append(&mut found);
            entries.push(Arc::new(entry));
        }
    }
    if served == 0 && items.is_some() {
        providers.fault(format_args!("has no entry of type {TYPE}, so there is nothing to serve; add one"));
    }
    faults.append(&mut listing.faults.into_inner());
    faults.extend(overrides.iter().map(|o| o.fault(format!("no entry of type {TYPE} has this name; correct it or unset the variable"))));
    if faults.is_empty() { Ok((Config { entries }, notes)) } else { Err(ConfigReport::new(path, faults)) }
}

/// An entry that is ours, before its block is read.
struct Head<'a> {
    name: String,
    settings: Field<'a>,
}

/// None for an entry of another type, with a note, and for one that is no entry at all, with a fault.
fn head<'a>(item: Field<'a>, names: &mut HashSet<String>, notes: &mut Vec<String>) -> Option<Head<'a>> {
    let lenient = item.named()?;
    let get = |key: &str| lenient.iter().find(|(name, _)| name == key).map(|(_, field)| field);
    let kind = match get("type") {
        Some(field) => field.required_text("say of which type the entry is")?,
        None => {
            item.missing_key("type", "say of which type the entry is");
            return None;
        }
    };
    let name = get("name").and_then(Field::text).unwrap_or_default();
    if kind != TYPE {
        names.insert(name.clone());
        let (name, kind) = (bounded_to(&name, 64), bounded_to(&kind, 64));
        notes.push(format!("entry {name} of type {kind} is not served here"));
        return None;
    }
    let block = item.block(ENTRY);
    let field = block.get("name");
    if let Some(name) = field.required_text("give the entry a name") {
        field.expect(is_identifier(&name), entry::NAME_RULE);
        field.expect(names.insert(name), "is the name of another entry too; names are unique");
    }
    let settings = block.get(TYPE);
    if !settings.is_set() {
        settings.missing("add the block with the entry's settings");
    }
    Some(Head { name, settings })
}

/// Merges the overrides over the block and reads it.
fn entry(document: &Document, head: &Head<'_>, settings: &Value, overrides: &[Override]) -> (Entry, Vec<Fault>) {
    let mut faults = Vec::new();
    let file = FileBlock(settings);
    let mut figment = Figment::from(file);
    for wanted in overrides {
        match wanted.resolve(settings) {
            Ok(resolved) => figment = figment.merge(resolved),
            Err(fault) => faults.push(fault),
        }
    }
    let merged = figment.data().ok().and_then(|mut profiles| profiles.remove(&Profile::Default)).unwrap_or_default();
    let merged = match settings {
        Value::Dict(tag, _) => Value::Dict(*tag, merged),
        // of a wrong type: the reader says so
        other => other.clone(),
    };
    let reading = Reading { document, merged: Some(&figment), faults: RefCell::new(faults) };
    let block = reading.field(head.settings.path().clone(), &merged).block(BLOCK);
    let entry = entry::read(&head.name, &block);
    (entry, reading.faults.into_inner())
}

/// The block as the file has it.
struct FileBlock<'a>(&'a Value);

impl Provider for FileBlock<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named("providers file")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Map::from([(Profile::Default, self.0.as_dict().cloned().unwrap_or_default())]))
    }
}

#[cfg(test)]
mod tests;
