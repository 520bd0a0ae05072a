//! The little that the double reads of the documents it is given.

use std::fmt::Write;

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use uuid::Uuid;

use super::{CallFailure, code, refused};

/// A well-formed document, flattened: every element with its path from the root.
pub(super) struct Document {
    elements: Vec<Element>,
    source: String,
}

struct Element {
    path: String,
    text: String,
    attributes: Vec<(String, String)>,
    /// Where it begins and ends in the source.
    span: (usize, usize),
}

impl Document {
    pub(super) fn parse(source: &str) -> Result<Self, CallFailure> {
        let bad = |what: &dyn std::fmt::Display| refused(code::XML_DETAIL, 27, format!("(definition): {what}"));
        let mut reader = Reader::from_str(source);
        let mut elements: Vec<Element> = Vec::new();
        let mut open: Vec<usize> = Vec::new();
        loop {
            let before = usize::try_from(reader.buffer_position()).unwrap_or(usize::MAX);
            let event = reader.read_event().map_err(|e| bad(&e))?;
            let after = usize::try_from(reader.buffer_position()).unwrap_or(usize::MAX);
            match event {
                Event::Start(start) => {
                    let element = Element::new(&start, open.last().map(|&i| elements[i].path.as_str()), before).map_err(|e| bad(&e))?;
                    open.push(elements.len());
                    elements.push(element);
                }
                Event::Empty(start) => {
                    let mut element = Element::new(&start, open.last().map(|&i| elements[i].path.as_str()), before).map_err(|e| bad(&e))?;
                    element.span.1 = after;
                    elements.push(element);
                }
                Event::End(_) => {
                    if let Some(i) = open.pop() {
                        elements[i].span.1 = after;
                    }
                }
                Event::Text(text) => {
                    if let Some(&i) = open.last() {
                        elements[i].text.push_str(&text);
                    }
                }
                Event::GeneralRef(name) => {
                    let text = quick_xml::escape::unescape(&format!("&{};", &*name)).map_err(|e| bad(&e))?.into_owned();
                    if let Some(&i) = open.last() {
                        elements[i].text.push_str(&text);
                    }
                }
                Event::Eof => break,
                _ => {}
            }
        }
        if elements.is_empty() || !open.is_empty() {
            return Err(bad(&"premature end of data"));
        }
        Ok(Self { elements, source: source.to_owned() })
    }

    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.elements.iter().find(|e| e.path == path).map(|e| e.text.trim().to_owned())
    }

    pub(super) fn attributes(&self, path: &str, name: &str) -> Vec<String> {
        let values = self.elements.iter().filter(|e| e.path == path);
        values.filter_map(|e| e.attributes.iter().find(|(n, _)| n == name)).map(|(_, v)| v.clone()).collect()
    }

    pub(super) fn attribute(&self, path: &str, name: &str) -> Option<String> {
        self.attributes(path, name).into_iter().next()
    }

    /// A size with its `unit`; None where the element is missing.
    pub(super) fn bytes(&self, path: &str) -> Result<Option<u64>, CallFailure> {
        let Some(text) = self.text(path) else { return Ok(None) };
        let shift = match self.attribute(path, "unit").as_deref() {
            None | Some("B" | "bytes" | "byte") => 0,
            Some("K" | "KiB") => 10,
            Some("M" | "MiB") => 20,
            Some("G" | "GiB") => 30,
            Some(other) => return Err(refused(code::INVALID_ARG, 18, format!("unknown suffix '{other}'"))),
        };
        let n = text.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
        n.map(Some).ok_or_else(|| refused(code::XML_ERROR, 18, format!("malformed size '{text}'")))
    }

    /// The elements of a domain's `<metadata>`, each with its namespace.
    pub(super) fn metadata(&self) -> Vec<(String, String)> {
        let children = self.elements.iter().filter(|e| e.path.strip_prefix("domain/metadata/").is_some_and(|rest| !rest.contains('/')));
        children
            .filter_map(|e| {
                let (_, uri) = e.attributes.iter().find(|(n, _)| n == "xmlns" || n.starts_with("xmlns:"))?;
                Some((uri.clone(), self.source[e.span.0..e.span.1].to_owned()))
            })
            .collect()
    }
}

impl Element {
    fn new(start: &BytesStart<'_>, parent: Option<&str>, at: usize) -> Result<Self, quick_xml::Error> {
        let name = start.name().as_ref().to_owned();
        let path = match parent {
            Some(p) => format!("{p}/{name}"),
            None => name,
        };
        let mut attributes = Vec::new();
        for attribute in start.attributes() {
            let attribute = attribute?;
            let value = quick_xml::escape::unescape(&attribute.value)?.into_owned();
            attributes.push((attribute.key.as_ref().to_owned(), value));
        }
        Ok(Self { path, text: String::new(), attributes, span: (at, at) })
    }
}

/// The document as libvirt hands it back: with a uuid and with the metadata of now.
pub(super) fn with_metadata(xml: &str, uuid: Uuid, metadata: &[(String, String)]) -> String {
    let mut out = xml.to_owned();
    if let (Some(from), Some(to)) = (out.find("<metadata>"), out.find("</metadata>")) {
        out.replace_range(from..to + "</metadata>".len(), "");
    }
    let mut insert = String::new();
    if !out.contains("<uuid>") {
        // writing into a String does not fail
        let _ = write!(insert, "<uuid>{uuid}</uuid>");
    }
    if !metadata.is_empty() {
        insert.push_str("<metadata>");
        metadata.iter().for_each(|(_, element)| insert.push_str(element));
        insert.push_str("</metadata>");
    }
    let root = out.find("<domain").unwrap_or(0);
    let at = out[root..].find('>').map_or(out.len(), |end| root + end + 1);
    out.insert_str(at, &insert);
    out
}
