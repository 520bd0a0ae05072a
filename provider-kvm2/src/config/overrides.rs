//! Environment overrides: `KVM2_PROVIDERS__<ENTRY>__<KEY>[__<ITEM>__<KEY>]`.
//!
//! Names are compared without case and punctuation, so `KVM2_HOME` is the entry
//! `kvm2-home`, `DISK_SIZE_GB` the key `diskSizeGb`, `HOSTS__HV1__ADDRESS` the
//! address of the host `hv1`. An override sets a key of something that the file
//! names; it makes no new hosts, images or machine types, because a variable's
//! name cannot spell theirs. A variable of this prefix that fits nothing is a fault.

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};

use super::report::{Fault, Path, Place};
use super::schema::{BLOCK, Key, Shape, folded, nearest};

pub(super) const PREFIX: &str = "KVM2_PROVIDERS__";
const SEPARATOR: &str = "__";

/// One variable that overrides a value of some entry.
#[derive(Debug, Clone)]
pub(super) struct Override {
    variable: String,
    /// The entry as the variable spells it.
    entry: String,
    steps: Vec<String>,
    value: String,
}

/// An override whose keys are resolved; what figment merges.
#[derive(Debug)]
pub(super) struct Resolved<'a> {
    pub(super) variable: &'a str,
    keys: Vec<String>,
    value: &'a str,
}

impl Override {
    /// None for a variable that is none of ours.
    pub(super) fn parse(variable: &str, value: &str) -> Option<Self> {
        let mut steps = variable.strip_prefix(PREFIX)?.split(SEPARATOR).map(str::to_owned);
        let entry = steps.next()?;
        Some(Self { variable: variable.to_owned(), entry, steps: steps.collect(), value: value.to_owned() })
    }

    pub(super) fn is_for(&self, entry: &str) -> bool {
        folded(&self.entry) == folded(entry)
    }

    pub(super) fn fault(&self, problem: String) -> Fault {
        Fault { place: Place::Variable(self.variable.clone()), path: Path::root(), value: None, problem }
    }

    /// Finds the keys that are meant, in the schema and in the entry's block.
    pub(super) fn resolve(&self, block: &Value) -> Result<Resolved<'_>, Fault> {
        let mut keys = Vec::new();
        let mut steps = self.steps.iter();
        let mut known = BLOCK;
        let mut here = Some(block);
        loop {
            let step = steps.next().ok_or_else(|| self.fault(format!("names no single value; add {SEPARATOR}<KEY>")))?;
            let key = self.known_key(known, step)?;
            keys.push(key.name.to_owned());
            here = here.and_then(|v| child(v, key.name));
            match key.shape {
                Shape::Leaf => break,
                Shape::Block(inner) => known = inner,
                Shape::Catalogue(inner) => {
                    let item = steps.next().map_or("", String::as_str);
                    let name = self.one_of(key, item, names(here).into_iter().map(|n| (n.clone(), n)))?;
                    here = here.and_then(|v| child(v, &name));
                    keys.push(name);
                    known = inner;
                }
                Shape::Named(inner) => {
                    let item = steps.next().map_or("", String::as_str);
                    let index = self.one_of(key, item, named_items(here))?;
                    here = here.and_then(|v| child(v, &index));
                    keys.push(index);
                    known = inner;
                }
            }
        }
        if steps.next().is_some() {
            return Err(self.fault(format!("goes on after {}, which is a single value", keys.join("."))));
        }
        if keys.first().is_some_and(|k| k == "hosts") && keys.last().is_some_and(|k| k == "name") {
            return Err(self.fault("the name of a host cannot be overridden: it is part of every instance's id".to_owned()));
        }
        Ok(Resolved { variable: &self.variable, keys, value: &self.value })
    }

    fn known_key<'k>(&self, known: &'k [Key], step: &str) -> Result<&'k Key, Fault> {
        known.iter().find(|k| folded(k.name) == folded(step)).ok_or_else(|| {
            let hint = nearest(step, known.iter().map(|k| k.name)).map(|k| format!("; did you mean {k}?")).unwrap_or_default();
            self.fault(format!("{step} is no key here{hint}"))
        })
    }

    /// The one candidate with this name; candidates are (name, key in the tree).
    fn one_of(&self, key: &Key, step: &str, candidates: impl Iterator<Item = (String, String)>) -> Result<String, Fault> {
        let mut fitting = candidates.filter(|(name, _)| folded(name) == folded(step));
        match (fitting.next(), fitting.next()) {
            (Some((_, at)), None) => Ok(at),
            (Some((a, _)), Some((b, _))) => {
                Err(self.fault(format!("{step} may be {a} or {b} of {}; rename one or set it in the file", key.name)))
            }
            (None, _) => Err(self.fault(format!("{} has nothing called {step}; add it to the file first", key.name))),
        }
    }
}

fn child<'v>(value: &'v Value, key: &str) -> Option<&'v Value> {
    value.as_dict()?.get(key)
}

fn names(value: Option<&Value>) -> Vec<String> {
    value.and_then(Value::as_dict).map(|d| d.keys().cloned().collect()).unwrap_or_default()
}

/// (name, index key) of every item of a list of blocks.
fn named_items(value: Option<&Value>) -> impl Iterator<Item = (String, String)> {
    let dict = value.and_then(Value::as_dict);
    dict.into_iter().flatten().filter_map(|(index, item)| Some((child(item, "name")?.as_str()?.to_owned(), index.clone())))
}

impl Provider for Resolved<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.variable.to_owned())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        // the value stays text: what it has to be is known where it is read
        let leaf = Value::from(self.value);
        let nested = self.keys.iter().rev().fold(leaf, |inner, key| Value::from(Dict::from([(key.clone(), inner)])));
        Ok(Map::from([(Profile::Default, nested.into_dict().unwrap_or_default())]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::raw::Document;

    fn block() -> Value {
        let text = "images:\n  debian-13: {url: x}\n  a-b: {url: x}\n  a.b: {url: x}\nhosts:\n- name: hv1\n- name: hv2\n";
        Document::parse(text, &mut Vec::new()).expect("valid").root
    }

    fn keys(variable: &str) -> Result<String, String> {
        let wanted = Override::parse(variable, "1").expect("ours");
        wanted.resolve(&block()).map(|r| r.keys.join("/")).map_err(|f| f.problem)
    }

    #[test]
    fn names_are_found_without_case_and_punctuation() {
        assert_eq!(keys("KVM2_PROVIDERS__E__DISK_SIZE_GB").as_deref(), Ok("diskSizeGb"));
        assert_eq!(keys("KVM2_PROVIDERS__E__BUDGETS__UPLOAD_IMAGE").as_deref(), Ok("budgets/uploadImage"));
        assert_eq!(keys("KVM2_PROVIDERS__E__IMAGES__DEBIAN_13__SHA256").as_deref(), Ok("images/debian-13/sha256"));
        assert_eq!(keys("KVM2_PROVIDERS__E__HOSTS__HV2__ADDRESS").as_deref(), Ok("hosts/[000001]/address"));
    }

    #[test]
    fn what_fits_nothing_or_two_things_is_a_fault() {
        for (variable, expected) in [
            ("KVM2_PROVIDERS__E__DISK_SIZE", "did you mean diskSizeGb"),
            ("KVM2_PROVIDERS__E", "names no single value"),
            ("KVM2_PROVIDERS__E__BUDGETS", "names no single value"),
            ("KVM2_PROVIDERS__E__IMAGES__FEDORA__URL", "nothing called FEDORA"),
            ("KVM2_PROVIDERS__E__IMAGES__A_B__URL", "may be a-b or a.b"),
            ("KVM2_PROVIDERS__E__MACHINE__X", "goes on after machine"),
            ("KVM2_PROVIDERS__E__HOSTS__HV1__NAME", "cannot be overridden"),
        ] {
            let problem = keys(variable).expect_err(variable);
            assert!(problem.contains(expected), "{variable}: {problem}");
        }
    }

    #[test]
    fn other_variables_are_none_of_ours() {
        assert!(Override::parse("KVM2_CONFIG", "x").is_none());
        assert!(Override::parse("KVM2_PROVIDERS", "x").is_none());
        let home = Override::parse("KVM2_PROVIDERS__KVM2_HOME__MACHINE", "q35").expect("ours");
        assert!(home.is_for("kvm2-home") && !home.is_for("kvm2-lab"));
    }
}
