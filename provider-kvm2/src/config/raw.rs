//! The file as it is written: a tree that knows the line of every value, the
//! spelling of every scalar and every repeated key.
//!
//! The tree is what figment merges the environment over; lines and spellings are
//! kept beside it by path, since figment's values have no place for them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use figment::value::{Dict, Empty, Num, Tag, Value};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Spanned};

use super::report::{Fault, Path, Place};
use crate::error::bounded;

/// A ConfigMap holds no more.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;

/// Deep enough for every key there is, and no depth that could exhaust a stack.
const MAX_DEPTH: usize = 32;
/// The most that aliases may repeat; a file whose hosts all share what they can is far below.
const MAX_REPLAYED: usize = 20_000;

/// A parsed file.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) root: Value,
    origins: HashMap<Path, Origin>,
}

#[derive(Debug, Clone)]
struct Origin {
    line: u64,
    /// The scalar as written, where that is not what figment's value says.
    spelling: Option<String>,
}

impl Document {
    /// None, with one fault, where the text is not YAML. Repeated keys are faults, the first one counts.
    pub(super) fn parse(text: &str, faults: &mut Vec<Fault>) -> Option<Self> {
        let options = serde_saphyr::options! {
            with_snippet: false,
            // repeated keys are reported by us, together with everything else
            duplicate_keys: DuplicateKeyPolicy::PassThrough,
            // so is a number that is none
            non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
            budget: serde_saphyr::budget! { max_depth: MAX_DEPTH },
            // aliases of aliases make seconds of work out of a few lines
            alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_REPLAYED },
        };
        match serde_saphyr::from_str_with_options::<Spanned<Tree>>(text, options) {
            Ok(tree) => {
                let mut growth = Growth { text, origins: HashMap::new(), faults };
                let root = growth.value(tree, &Path::root());
                Some(Self { root, origins: growth.origins })
            }
            Err(e) => {
                let line = e.location().map(|l| l.line()).filter(|l| *l > 0);
                let problem = format!("not readable as YAML: {}; correct the syntax", bounded(&e.without_snippet().to_string()));
                faults.push(Fault { place: Place::File { line }, path: Path::root(), value: None, problem });
                None
            }
        }
    }

    /// The line of the value at `path`, or of the nearest value around it.
    pub(super) fn line(&self, path: &Path) -> Option<u64> {
        let mut path = path.clone();
        loop {
            if let Some(origin) = self.origins.get(&path) {
                return Some(origin.line);
            }
            path = path.parent()?;
        }
    }

    /// How the scalar at `path` is written in the file, if it was read as something else than text.
    pub(super) fn spelling(&self, path: &Path) -> Option<&str> {
        self.origins.get(path)?.spelling.as_deref()
    }
}

/// Lists become maps from `[0]`, `[1]`… so that figment can merge one value of one
/// item: it replaces arrays whole.
pub(super) fn index(i: usize) -> String {
    // padded, since figment's maps are sorted by text
    format!("[{i:06}]")
}

/// The index back from a key made by [`index`].
pub(super) fn parse_index(key: &str) -> Option<usize> {
    key.strip_prefix('[')?.strip_suffix(']')?.parse().ok()
}

enum Tree {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Spanned<Tree>>),
    Map(Vec<(Spanned<String>, Spanned<Tree>)>),
}

struct Growth<'a> {
    text: &'a str,
    origins: HashMap<Path, Origin>,
    faults: &'a mut Vec<Fault>,
}

impl Growth<'_> {
    fn value(&mut self, node: Spanned<Tree>, path: &Path) -> Value {
        let tag = Tag::Default;
        let mut spelling = None;
        let value = match node.value {
            Tree::Null => Value::Empty(tag, Empty::None),
            Tree::Text(text) => Value::String(tag, text),
            Tree::Bool(b) => Value::Bool(tag, b),
            Tree::Int(n) => {
                spelling = written(self.text, node.defined);
                Value::Num(tag, Num::I128(n))
            }
            Tree::Float(n) => {
                spelling = written(self.text, node.defined);
                Value::Num(tag, Num::F64(n))
            }
            Tree::List(items) if items.is_empty() => Value::Array(tag, Vec::new()),
            Tree::List(items) => {
                let items = items.into_iter().enumerate().map(|(i, item)| {
                    let key = index(i);
                    let value = self.value(item, &path.join(&key));
                    (key, value)
                });
                Value::Dict(tag, items.collect())
            }
            Tree::Map(pairs) => Value::Dict(tag, self.pairs(pairs, path)),
        };
        self.origins.insert(path.clone(), Origin { line: node.referenced.line(), spelling });
        value
    }

    fn pairs(&mut self, pairs: Vec<(Spanned<String>, Spanned<Tree>)>, path: &Path) -> Dict {
        let mut dict = Dict::new();
        let mut lines = BTreeMap::new();
        for (key, node) in pairs {
            let line = key.referenced.line();
            let at = path.join(&key.value);
            if let Some(first) = lines.get(&key.value) {
                let problem = format!("the key is there twice, first in line {first}; keep one");
                self.faults.push(Fault { place: Place::File { line: Some(line) }, path: at, value: None, problem });
                continue;
            }
            lines.insert(key.value.clone(), line);
            let value = self.value(node, &at);
            // a block starts on the line after its key; people look for the key
            if let Some(origin) = self.origins.get_mut(&at) {
                origin.line = line;
            }
            dict.insert(key.value, value);
        }
        dict
    }
}

/// The text of a scalar as it is written.
fn written(text: &str, at: serde_saphyr::Location) -> Option<String> {
    let start = usize::try_from(at.span().byte_offset()?).ok()?;
    let len = usize::try_from(at.span().byte_len()?).ok()?;
    text.get(start..start.checked_add(len)?).map(|s| s.trim().to_owned()).filter(|s| !s.is_empty())
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_bool<E>(self, v: bool) -> Result<Tree, E> {
        Ok(Tree::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Tree, E> {
        Ok(Tree::Int(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Tree, E> {
        Ok(Tree::Int(v.into()))
    }

    fn visit_i128<E>(self, v: i128) -> Result<Tree, E> {
        Ok(Tree::Int(v))
    }

    fn visit_u128<E: serde::de::Error>(self, v: u128) -> Result<Tree, E> {
        i128::try_from(v).map(Tree::Int).map_err(|_| E::custom("a number is too large"))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Tree, E> {
        Ok(Tree::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Tree, E> {
        Ok(Tree::Text(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Tree, E> {
        Ok(Tree::Text(v))
    }

    fn visit_bytes<E: serde::de::Error>(self, _: &[u8]) -> Result<Tree, E> {
        Err(E::custom("binary values are not used here"))
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_none<E>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Tree, D::Error> {
        Tree::deserialize(d)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Tree::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut pairs: Vec<(Spanned<String>, Spanned<Tree>)> = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            if parse_index(&key.value).is_some() {
                return Err(A::Error::custom("a key looks like a list index"));
            }
            pairs.push((key, map.next_value()?));
        }
        Ok(Tree::Map(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> (Option<Document>, Vec<Fault>) {
        let mut faults = Vec::new();
        let document = Document::parse(text, &mut faults);
        (document, faults)
    }

    fn path(steps: &[&str]) -> Path {
        steps.iter().fold(Path::root(), |p, s| p.join(s))
    }

    #[test]
    fn every_value_knows_its_line() {
        let (doc, faults) = parse("a: 1\nb:\n  c:\n  - x\n  - y: z\n");
        let doc = doc.expect("valid");
        assert!(faults.is_empty());
        assert_eq!(doc.line(&path(&["a"])), Some(1));
        assert_eq!(doc.line(&path(&["b"])), Some(2));
        assert_eq!(doc.line(&path(&["b", "c", &index(1), "y"])), Some(5));
        assert_eq!(doc.line(&path(&["b", "c", &index(1), "missing"])), Some(5), "the nearest value around it");
    }

    #[test]
    fn a_number_keeps_its_spelling() {
        let (doc, _) = parse("digest: 00123\nversion: 24.10\nalias: &v 0x10\nuse: *v\n");
        let doc = doc.expect("valid");
        assert_eq!(doc.spelling(&path(&["digest"])), Some("00123"));
        assert_eq!(doc.spelling(&path(&["version"])), Some("24.10"));
        assert_eq!(doc.spelling(&path(&["use"])), Some("0x10"));
    }

    #[test]
    fn a_repeated_key_is_a_fault_with_both_lines() {
        let (doc, faults) = parse("a: 1\nb: 2\na: 3\n");
        assert!(doc.is_some());
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].place, Place::File { line: Some(3) });
        assert!(faults[0].problem.contains("line 1"), "{}", faults[0].problem);
    }

    #[test]
    fn merged_anchors_are_not_repeated_keys() {
        let (doc, faults) = parse("base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\n");
        assert!(faults.is_empty());
        let found = doc.expect("valid").root.find("use.y").expect("merged");
        assert_eq!(found.to_u128().or(found.to_i128().map(|n| n as u128)), Some(3));
    }

    #[test]
    fn a_syntax_error_is_one_fault_with_its_line_and_without_the_text() {
        let (doc, faults) = parse("a: 1\nkey: \"SENTINEL\nb: 2\n");
        assert!(doc.is_none());
        assert_eq!(faults.len(), 1);
        assert!(matches!(faults[0].place, Place::File { line: Some(_) }));
        assert!(!faults[0].problem.contains("SENTINEL"), "{}", faults[0].problem);
    }

    #[test]
    fn a_bomb_of_aliases_or_depth_is_refused() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for i in 1..10 {
            let previous = format!("*a{},", i - 1).repeat(10);
            bomb.push_str(&format!("a{i}: &a{i} [{}]\n", previous.trim_end_matches(',')));
        }
        assert!(parse(&bomb).0.is_none());
        assert!(parse(&"[".repeat(100_000)).0.is_none());
        assert!(parse(&"- ".repeat(100_000)).0.is_none());
    }
}
