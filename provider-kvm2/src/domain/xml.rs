//! One small tree for the XML that is sent to a host and the XML that it answers.
//!
//! What a host says is untrusted: a document has a largest length, depth and
//! number of elements, a document type is refused, and no entity is expanded but
//! the five predefined ones and character references. Prefixes of names are
//! dropped, since libvirt returns metadata without its namespace declaration.

use std::fmt::Write as _;

use quick_xml::Reader;
use quick_xml::escape::{resolve_predefined_entity, unescape};
use quick_xml::events::{BytesStart, Event};

/// Deep enough for the longest backing chain that libvirt follows (200 links).
const MAX_DEPTH: usize = 256;
/// libvirt's own documents have at most ten or so.
const MAX_ATTRIBUTES: usize = 64;
/// The capabilities of a host have some 5000; each costs a hundred bytes or more, whatever its own length.
const MAX_ELEMENTS: usize = 1 << 16;

/// Largest document that is read. A domain of ours has some 10 KiB; the
/// capabilities of a host with every CPU model named have some 100 KiB.
pub(crate) const MAX_DOCUMENT: usize = 1 << 20;

/// Why a host's XML is not usable. Says nothing of its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum XmlFault {
    #[error("longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error("nested more than {MAX_DEPTH} elements deep")]
    TooDeep,
    #[error("an element with more than {MAX_ATTRIBUTES} attributes")]
    TooManyAttributes,
    #[error("more than {MAX_ELEMENTS} elements")]
    TooManyElements,
    #[error("a character that XML cannot hold")]
    Character,
    #[error("a document type, which libvirt never sends")]
    DocumentType,
    #[error("an entity that is not predefined")]
    UnknownEntity,
    #[error("not well-formed near byte {at}")]
    Malformed { at: u64 },
    #[error("not an <{expected}> document")]
    WrongRoot { expected: &'static str },
    #[error("no usable <{element}>")]
    Missing { element: &'static str },
}

/// An element: local name, attributes, its own text in one piece, its children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Element {
    name: String,
    attributes: Vec<(String, String)>,
    text: String,
    children: Vec<Element>,
}

impl Element {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// `<name>text</name>`
    pub(crate) fn leaf(name: &str, text: impl ToString) -> Self {
        Self { text: text.to_string(), ..Self::new(name) }
    }

    pub(crate) fn with(mut self, attribute: &str, value: impl ToString) -> Self {
        self.attributes.push((attribute.to_owned(), value.to_string()));
        self
    }

    pub(crate) fn and(mut self, child: Element) -> Self {
        self.children.push(child);
        self
    }

    pub(crate) fn and_all(mut self, children: impl IntoIterator<Item = Element>) -> Self {
        self.children.extend(children);
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// Its text without the white space around it.
    pub(crate) fn text(&self) -> &str {
        self.text.trim()
    }

    pub(crate) fn children<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Element> {
        self.children.iter().filter(move |c| c.name == name)
    }

    pub(crate) fn all_children(&self) -> &[Element] {
        &self.children
    }

    pub(crate) fn child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|c| c.name == name)
    }

    /// The first element at the end of `path`, one name per level.
    pub(crate) fn find(&self, path: &[&str]) -> Option<&Element> {
        path.iter().try_fold(self, |at, name| at.child(name))
    }

    pub(crate) fn parse(text: &str, limit: usize) -> Result<Self, XmlFault> {
        if text.len() > limit {
            return Err(XmlFault::TooLong { limit });
        }
        let mut reader = Reader::from_str(text);
        // elements that are open, outermost first
        let mut open: Vec<Element> = Vec::new();
        let mut root = None;
        let mut elements = 0;
        loop {
            let event = reader.read_event().map_err(|_| XmlFault::Malformed { at: reader.error_position() })?;
            let malformed = || XmlFault::Malformed { at: reader.buffer_position() };
            if matches!(event, Event::Start(_) | Event::Empty(_)) {
                elements += 1;
                if elements > MAX_ELEMENTS {
                    return Err(XmlFault::TooManyElements);
                }
            }
            let closed = match event {
                Event::Start(start) => {
                    if open.len() == MAX_DEPTH {
                        return Err(XmlFault::TooDeep);
                    }
                    open.push(element(&start, &malformed)?);
                    None
                }
                Event::Empty(start) => Some(element(&start, &malformed)?),
                Event::End(_) => Some(open.pop().ok_or_else(malformed)?),
                Event::Text(text) => {
                    append(&mut open, &text)?;
                    None
                }
                Event::CData(text) => {
                    append(&mut open, &text)?;
                    None
                }
                Event::GeneralRef(entity) => {
                    let ch = entity.resolve_char_ref().map_err(|_| malformed())?;
                    let mut buffer = [0; 4];
                    match ch {
                        Some(ch) => append(&mut open, ch.encode_utf8(&mut buffer))?,
                        None => append(&mut open, resolve_predefined_entity(&entity).ok_or(XmlFault::UnknownEntity)?)?,
                    }
                    None
                }
                Event::DocType(_) => return Err(XmlFault::DocumentType),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => None,
                Event::Eof => break,
            };
            let Some(closed) = closed else { continue };
            match open.last_mut() {
                Some(parent) => parent.children.push(closed),
                // text after the root is ignored, a second root is not
                None if root.is_none() => root = Some(closed),
                None => return Err(malformed()),
            }
        }
        let end = XmlFault::Malformed { at: reader.buffer_position() };
        if open.is_empty() { root.ok_or(end) } else { Err(end) }
    }

    /// As [`parse`](Self::parse) with the limit for whole documents; the root has to be `name`.
    pub(crate) fn parse_document(text: &str, name: &'static str) -> Result<Self, XmlFault> {
        let root = Self::parse(text, MAX_DOCUMENT)?;
        if root.name == name { Ok(root) } else { Err(XmlFault::WrongRoot { expected: name }) }
    }

    /// The document, two spaces per level.
    pub(crate) fn to_xml(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, 0);
        out
    }

    fn write(&self, out: &mut String, depth: usize) {
        let indent = "  ".repeat(depth);
        // writing to a String cannot fail
        let _ = write!(out, "{indent}<{}", self.name);
        for (name, value) in &self.attributes {
            let _ = write!(out, " {name}=\"{}\"", escaped(value));
        }
        if self.children.is_empty() && self.text.is_empty() {
            out.push_str("/>\n");
        } else if self.children.is_empty() {
            let _ = writeln!(out, ">{}</{}>", escaped(&self.text), self.name);
        } else {
            let _ = writeln!(out, ">{}", escaped(&self.text));
            for child in &self.children {
                child.write(out, depth + 1);
            }
            let _ = writeln!(out, "{indent}</{}>", self.name);
        }
    }
}

fn append(open: &mut [Element], text: &str) -> Result<(), XmlFault> {
    if let Some(element) = open.last_mut() {
        element.text.push_str(checked(text)?);
    }
    Ok(())
}

/// No parser of libvirt's lets these pass, written out or as a reference; ours does not look.
fn checked(text: &str) -> Result<&str, XmlFault> {
    if text.chars().any(is_no_xml) { Err(XmlFault::Character) } else { Ok(text) }
}

/// What XML 1.0 cannot hold in any form.
fn is_no_xml(ch: char) -> bool {
    matches!(ch, '\0'..'\t' | '\x0b' | '\x0c' | '\x0e'..' ' | '\u{fffe}' | '\u{ffff}')
}

fn element(start: &BytesStart<'_>, malformed: &impl Fn() -> XmlFault) -> Result<Element, XmlFault> {
    let mut element = Element::new(start.local_name().as_ref());
    for attribute in start.attributes() {
        if element.attributes.len() == MAX_ATTRIBUTES {
            return Err(XmlFault::TooManyAttributes);
        }
        let attribute = attribute.map_err(|_| malformed())?;
        let value = unescape(&attribute.value).map_err(|_| XmlFault::UnknownEntity)?;
        element = element.with(attribute.key.local_name().as_ref(), checked(&value)?);
    }
    Ok(element)
}

/// Text fit for an attribute or an element. What XML 1.0 cannot hold becomes U+FFFD; white space
/// that a parser would normalise becomes a character reference.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for ch in text.chars() {
        match ch {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\t' => out.push_str("&#9;"),
            '\n' => out.push_str("&#10;"),
            '\r' => out.push_str("&#13;"),
            ch if is_no_xml(ch) => out.push('\u{fffd}'),
            ch => out.push(ch),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn parse(text: &str) -> Result<Element, XmlFault> {
        Element::parse(text, MAX_DOCUMENT)
    }

    #[test]
    fn prefixes_are_dropped_and_text_is_joined_across_entities_and_cdata() {
        let root = parse("<?xml version='1.0'?>\n<k:a xmlns:k='u' k:b='x &amp; y'> 1&lt;2<!-- c --><![CDATA[<3]]>&#52; </k:a>\n")
            .expect("well-formed");
        assert_eq!((root.name(), root.text(), root.attribute("b")), ("a", "1<2<34", Some("x & y")));
    }

    #[rstest]
    #[case::nothing("")]
    #[case::text_only("abc")]
    #[case::unclosed("<a><b></b>")]
    #[case::crossed("<a><b></a></b>")]
    #[case::two_roots("<a/><b/>")]
    #[case::nul_reference("<a>&#0;</a>")]
    #[case::attribute_without_quotes("<a b=c/>")]
    #[case::repeated_attribute("<a b='1' b='2'/>")]
    fn what_is_not_well_formed_is_refused(#[case] text: &str) {
        assert!(matches!(parse(text), Err(XmlFault::Malformed { .. })), "{text}: {:?}", parse(text));
    }

    #[rstest]
    #[case::document_type("<!DOCTYPE a [<!ENTITY x 'y'>]><a>&x;</a>", XmlFault::DocumentType)]
    #[case::entity_in_text("<a>&x;</a>", XmlFault::UnknownEntity)]
    #[case::entity_in_attribute("<a b='&x;'/>", XmlFault::UnknownEntity)]
    fn entities_are_never_expanded(#[case] text: &str, #[case] fault: XmlFault) {
        assert_eq!(parse(text), Err(fault));
    }

    #[rstest]
    #[case::written_out("<a>\u{1b}[31m</a>")]
    #[case::reference("<a>&#27;[31m</a>")]
    #[case::cdata("<a><![CDATA[\0]]></a>")]
    #[case::attribute("<a b='\u{1b}'/>")]
    #[case::reference_in_attribute("<a b='&#x1;'/>")]
    #[case::no_character("<a>\u{ffff}</a>")]
    fn a_character_that_xml_cannot_hold_is_refused(#[case] text: &str) {
        assert_eq!(parse(text), Err(XmlFault::Character));
    }

    #[test]
    fn length_depth_attributes_and_elements_have_limits() {
        assert_eq!(Element::parse("<abc/>", 5), Err(XmlFault::TooLong { limit: 5 }));
        let nested = |n: usize| format!("{}{}", "<a>".repeat(n), "</a>".repeat(n));
        assert!(parse(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(parse(&nested(MAX_DEPTH + 1)), Err(XmlFault::TooDeep));
        let attributes: String = (0..=MAX_ATTRIBUTES).map(|n| format!(" a{n}=''")).collect();
        assert_eq!(parse(&format!("<a{attributes}/>")), Err(XmlFault::TooManyAttributes));
        let flat = |n: usize| format!("<a>{}</a>", "<b/>".repeat(n));
        assert!(parse(&flat(MAX_ELEMENTS - 1)).is_ok());
        assert_eq!(parse(&flat(MAX_ELEMENTS)), Err(XmlFault::TooManyElements));
    }

    proptest! {
        #[test]
        fn any_text_survives_writing_and_reading(value in "\\PC*", text in "\\PC*") {
            let element = Element::leaf("a", &text).with("b", &value);
            let read = parse(&element.to_xml()).expect("own output is well-formed");
            prop_assert_eq!(read.attribute("b"), Some(value.as_str()));
            prop_assert_eq!(read.text(), text.trim());
        }

        #[test]
        fn junk_never_panics(text in "[<>/a=\"'&;#!\\[\\]?-]{0,200}") {
            let _ = parse(&text);
        }
    }
}
