//! Reads typed values out of the merged tree and collects what is wrong with it
//! instead of stopping at the first fault.
//!
//! A value that is absent, `null` or an empty text counts as not set, as it did
//! for the predecessor. A fault yields `None`, so callers go on with a default:
//! nothing of a configuration with faults is ever used.

use std::cell::RefCell;
use std::fmt::Display;
use std::ops::RangeInclusive;

use figment::Figment;
use figment::value::{Dict, Num, Value};

use super::overrides::PREFIX;
use super::raw::{Document, parse_index};
use super::report::{Fault, Path, Place, shown};
use super::schema::{Key, nearest};

const MAP: &str = "a map";
const LIST: &str = "a list";

/// What all fields of one file share.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    pub(super) document: &'a Document,
    /// What the tree was merged from; knows the variable behind a value. None for the plain file.
    pub(super) merged: Option<&'a Figment>,
    pub(super) faults: RefCell<Vec<Fault>>,
}

/// A place in the tree and the value there, if any.
#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    reading: &'a Reading<'a>,
    path: Path,
    value: Option<&'a Value>,
    faults: Faults,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Faults {
    Collected,
    /// What is around this field is wrong already; its keys are not missed one by one.
    Dropped,
}

/// A map whose keys are all known.
#[derive(Debug)]
pub(super) struct Block<'a> {
    field: Field<'a>,
    dict: Option<&'a Dict>,
}

impl<'a> Reading<'a> {
    pub(super) fn field(&'a self, path: Path, value: &'a Value) -> Field<'a> {
        Field { reading: self, path, value: Some(value), faults: Faults::Collected }
    }
}

impl<'a> Field<'a> {
    pub(super) fn is_set(&self) -> bool {
        !matches!(self.value, None | Some(Value::Empty(..)))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn value(&self) -> Option<&'a Value> {
        self.value
    }

    fn child(&self, key: &str, value: Option<&'a Value>) -> Self {
        Self { path: self.path.join(key), value, ..*self }
    }

    /// Where this value was written; for an absent one, what is around it.
    fn place(&self) -> Place {
        match self.variable() {
            Some(variable) => Place::Variable(variable.to_owned()),
            None => Place::File { line: self.reading.document.line(&self.path) },
        }
    }

    /// The variable that this value comes from.
    fn variable(&self) -> Option<&str> {
        // variables set texts only; a merged map has the tag of what was last put into it
        let value = self.value.filter(|v| matches!(v, Value::String(..)))?;
        let name = &self.reading.merged?.get_metadata(value.tag())?.name;
        name.starts_with(PREFIX).then_some(name)
    }

    fn is_from_variable(&self) -> bool {
        self.variable().is_some()
    }

    fn push(&self, value: Option<String>, problem: String) {
        if self.faults == Faults::Dropped {
            return;
        }
        self.reading.faults.borrow_mut().push(Fault { place: self.place(), path: self.path.clone(), value, problem });
    }

    /// Something is wrong with the value of this field.
    pub(super) fn fault(&self, problem: impl Display) {
        let value = self.scalar().map(|text| shown(&self.path, &text));
        self.push(value, problem.to_string());
    }

    /// `problem` if the condition does not hold.
    pub(super) fn expect(&self, holds: bool, problem: impl Display) {
        if !holds {
            self.fault(problem);
        }
    }

    /// A required value is not there.
    pub(super) fn missing(&self, advice: &str) {
        self.push(None, format!("is required; {advice}"));
    }

    /// A required key of this map is not there.
    pub(super) fn missing_key(&self, name: &str, advice: &str) {
        self.child(name, None).missing(advice);
    }

    fn wrong_type(&self, expected: &str) {
        let container = matches!(expected, MAP | LIST);
        let found = match self.value {
            Some(Value::Dict(_, d)) if d.keys().any(|k| parse_index(k).is_some()) => "a list".to_owned(),
            Some(Value::Array(..)) => "a list".to_owned(),
            Some(Value::Dict(..)) => "a map".to_owned(),
            Some(Value::Empty(..)) | None => "nothing".to_owned(),
            // a text in place of a map is a damaged part of the file, and may hold anything
            Some(Value::String(_, s)) if container => format!("{} bytes of text", s.len()),
            Some(v) => {
                let kind = match v {
                    Value::Bool(..) => "the boolean",
                    Value::Num(..) => "the number",
                    _ => "the text",
                };
                format!("{kind} {}", shown(&self.path, &self.scalar().unwrap_or_default()))
            }
        };
        self.push(Some(found), format!("{expected} is expected"));
    }

    /// A scalar as a person wrote it.
    fn scalar(&self) -> Option<String> {
        let written = |fallback: String| self.reading.document.spelling(&self.path).map_or(fallback, str::to_owned);
        match self.value? {
            Value::String(_, s) => Some(s.clone()),
            Value::Char(_, c) => Some(c.to_string()),
            Value::Bool(_, b) => Some(b.to_string()),
            Value::Num(_, n) => Some(written(integer(*n).map_or_else(|| n.to_f64().unwrap_or_default().to_string(), |n| n.to_string()))),
            Value::Empty(..) | Value::Dict(..) | Value::Array(..) => None,
        }
    }

    /// Numbers and booleans are taken as they are written: nobody quotes a digest.
    pub(super) fn text(&self) -> Option<String> {
        if !self.is_set() {
            return None;
        }
        let text = self.scalar();
        if text.is_none() {
            self.wrong_type("text");
        }
        text.filter(|t| !t.is_empty())
    }

    pub(super) fn required_text(&self, advice: &str) -> Option<String> {
        let empty = matches!(self.value, Some(Value::String(_, s)) if s.is_empty());
        if !self.is_set() || empty {
            self.missing(advice);
            return None;
        }
        self.text()
    }

    pub(super) fn number(&self, limits: RangeInclusive<u64>) -> Option<u64> {
        if !self.is_set() {
            return None;
        }
        let number = match self.value {
            Some(Value::Num(_, n)) => integer(*n),
            Some(Value::String(_, s)) if self.is_from_variable() => s.trim().parse().ok(),
            _ => None,
        };
        let Some(number) = number else {
            self.wrong_type("a whole number");
            return None;
        };
        let inside = u64::try_from(number).ok().filter(|n| limits.contains(n));
        if inside.is_none() {
            self.fault(format_args!("must be {} to {}", limits.start(), limits.end()));
        }
        inside
    }

    pub(super) fn flag(&self) -> Option<bool> {
        if !self.is_set() {
            return None;
        }
        let flag = match self.value {
            Some(Value::Bool(_, b)) => Some(*b),
            Some(Value::String(_, s)) if self.is_from_variable() => match s.trim().to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "1" => Some(true),
                "false" | "no" | "off" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        };
        if flag.is_none() {
            self.wrong_type("true or false");
        }
        flag
    }

    /// One word of a few.
    pub(super) fn choice<T: Copy>(&self, words: &[(&str, T)]) -> Option<T> {
        let text = self.text()?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, t)| *t);
        if found.is_none() {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.fault(format_args!("must be {}", words.join(" or ")));
        }
        found
    }

    /// The map here; an absent one has no keys. Unknown keys are faults.
    pub(super) fn block(mut self, keys: &[Key]) -> Block<'a> {
        let dict = match self.value {
            Some(Value::Dict(_, d)) if !d.keys().any(|k| parse_index(k).is_some()) => Some(d),
            None | Some(Value::Empty(..)) => None,
            Some(_) => {
                self.wrong_type(MAP);
                self.faults = Faults::Dropped;
                None
            }
        };
        for (name, value) in dict.into_iter().flatten() {
            if !keys.iter().any(|k| k.name == name) {
                let unknown = self.child(name, Some(value));
                let hint = match nearest(name, keys.iter().map(|k| k.name)) {
                    Some(key) => format!("unknown key; did you mean {key}?"),
                    None => format!("unknown key; known here: {}", keys.iter().map(|k| k.name).collect::<Vec<_>>().join(", ")),
                };
                // the value is not shown: who knows what an unknown key holds
                unknown.push(None, hint);
            }
        }
        Block { field: self, dict }
    }

    /// The named items of a map whose keys the author chooses; None, with a fault, if it is no map.
    pub(super) fn named(&self) -> Option<Vec<(String, Self)>> {
        match self.value {
            Some(Value::Dict(_, d)) if !d.keys().any(|k| parse_index(k).is_some()) => {
                Some(self.children(d).map(|f| (f.path.last().to_owned(), f)).collect())
            }
            None | Some(Value::Empty(..)) => Some(Vec::new()),
            Some(_) => {
                self.wrong_type(MAP);
                None
            }
        }
    }

    /// The items of a list; None, with a fault, if it is none.
    pub(super) fn items(&self) -> Option<Vec<Self>> {
        match self.value {
            Some(Value::Dict(_, d)) if d.keys().any(|k| parse_index(k).is_some()) => Some(self.children(d).collect()),
            Some(Value::Array(_, items)) if items.is_empty() => Some(Vec::new()),
            None | Some(Value::Empty(..)) => Some(Vec::new()),
            Some(_) => {
                self.wrong_type(LIST);
                None
            }
        }
    }

    fn children(&self, dict: &'a Dict) -> impl Iterator<Item = Self> {
        dict.iter().map(|(key, value)| self.child(key, Some(value)))
    }

    /// A list of texts, each with the field to blame; in a variable separated by commas.
    pub(super) fn texts(&self) -> Vec<(String, Self)> {
        match self.value {
            Some(Value::String(_, s)) if self.is_from_variable() => {
                s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| (s.to_owned(), self.clone())).collect()
            }
            _ => self.items().into_iter().flatten().filter_map(|f| Some((f.text()?, f))).collect(),
        }
    }
}

impl<'a> Block<'a> {
    pub(super) fn get(&self, name: &'static str) -> Field<'a> {
        self.field.child(name, self.dict.and_then(|d| d.get(name)))
    }
}

/// Whole numbers only; `1e3` is one.
fn integer(n: Num) -> Option<i128> {
    // figment's own conversions do not convert between signs
    match n {
        Num::U8(n) => Some(n.into()),
        Num::U16(n) => Some(n.into()),
        Num::U32(n) => Some(n.into()),
        Num::U64(n) => Some(n.into()),
        Num::U128(n) => i128::try_from(n).ok(),
        Num::USize(n) => i128::try_from(n).ok(),
        Num::I8(n) => Some(n.into()),
        Num::I16(n) => Some(n.into()),
        Num::I32(n) => Some(n.into()),
        Num::I64(n) => Some(n.into()),
        Num::I128(n) => Some(n),
        Num::ISize(n) => i128::try_from(n).ok(),
        Num::F32(n) => whole(n.into()),
        Num::F64(n) => whole(n),
    }
}

fn whole(n: f64) -> Option<i128> {
    // the cast saturates; every limit lies far below where f64 stops being exact
    (n.is_finite() && n.fract() == 0.0).then_some(n as i128)
}
