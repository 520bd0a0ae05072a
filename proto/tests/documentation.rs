//! The comments of the `.proto` files are the contract, so they are tested like code:
//! every field says REQUIRED or OPTIONAL, every reason agrees with the table in Rust, and the table of
//! `docs/contract.md` is made from both. `UPDATE_DOCS=1` rewrites that table.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use egress_provider_proto::FILE_DESCRIPTOR_SET;
use egress_provider_proto::v1::ErrorReason;
use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};

const PACKAGE: &str = "egressproxies.provider.v1";
const TABLE_BEGIN: &str = "<!-- error table: begin, made from error.proto -->\n";
const TABLE_END: &str = "<!-- error table: end -->\n";

// Field numbers of google/protobuf/descriptor.proto, of which the paths to comments consist.
const FILE_MESSAGE: i32 = 4;
const FILE_ENUM: i32 = 5;
const FILE_SERVICE: i32 = 6;
const MESSAGE_FIELD: i32 = 2;
const MESSAGE_NESTED: i32 = 3;
const MESSAGE_ENUM: i32 = 4;
const MESSAGE_ONEOF: i32 = 8;
const ENUM_VALUE: i32 = 2;
const SERVICE_METHOD: i32 = 2;

/// What a comment stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Message,
    /// A field outside a oneof, or a oneof: what the reader has to set or not.
    Choice,
    OneofMember,
    Enum,
    EnumValue,
    Service,
    Method,
}

struct Comment {
    kind: Kind,
    name: String,
    text: String,
}

/// Every element of the contract with its leading comment on one line.
fn comments() -> Vec<Comment> {
    let set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).expect("a descriptor set");
    let mut found = Vec::new();
    for file in set.file.iter().filter(|file| file.package() == PACKAGE) {
        let mut walk = Walk { comments: leading_comments(file), found: &mut found };
        for (at, message) in (0..).zip(&file.message_type) {
            walk.message(message, &[FILE_MESSAGE, at], "");
        }
        for (at, item) in (0..).zip(&file.enum_type) {
            walk.enumeration(item, &[FILE_ENUM, at], "");
        }
        for (at, service) in (0..).zip(&file.service) {
            let path = [FILE_SERVICE, at];
            walk.add(Kind::Service, service.name().to_owned(), &path);
            for (at, method) in (0..).zip(&service.method) {
                let name = format!("{}.{}", service.name(), method.name());
                walk.add(Kind::Method, name, &below(&path, SERVICE_METHOD, at));
            }
        }
    }
    found
}

fn leading_comments(file: &FileDescriptorProto) -> HashMap<Vec<i32>, String> {
    let info = file.source_code_info.as_ref().expect("comments are kept");
    info.location
        .iter()
        .filter_map(|place| {
            let words: Vec<_> = place.leading_comments.as_ref()?.split_whitespace().collect();
            Some((place.path.clone(), words.join(" ")))
        })
        .collect()
}

fn below(path: &[i32], field: i32, at: i32) -> Vec<i32> {
    [path, &[field, at]].concat()
}

struct Walk<'a> {
    comments: HashMap<Vec<i32>, String>,
    found: &'a mut Vec<Comment>,
}

impl Walk<'_> {
    fn add(&mut self, kind: Kind, name: String, path: &[i32]) {
        let text = self.comments.get(path).cloned().unwrap_or_default();
        self.found.push(Comment { kind, name, text });
    }

    fn message(&mut self, message: &DescriptorProto, path: &[i32], scope: &str) {
        let name = format!("{scope}{}", message.name());
        self.add(Kind::Message, name.clone(), path);
        for (at, field) in (0..).zip(&message.field) {
            let kind = match field.oneof_index {
                Some(_) if !field.proto3_optional() => Kind::OneofMember,
                _ => Kind::Choice,
            };
            self.add(kind, format!("{name}.{}", field.name()), &below(path, MESSAGE_FIELD, at));
        }
        for (at, oneof) in (0..).zip(&message.oneof_decl) {
            // What protobuf makes up for an optional field is named so.
            if !oneof.name().starts_with('_') {
                let name = format!("{name}.{}", oneof.name());
                self.add(Kind::Choice, name, &below(path, MESSAGE_ONEOF, at));
            }
        }
        let scope = format!("{name}.");
        for (at, nested) in (0..).zip(&message.nested_type) {
            self.message(nested, &below(path, MESSAGE_NESTED, at), &scope);
        }
        for (at, nested) in (0..).zip(&message.enum_type) {
            self.enumeration(nested, &below(path, MESSAGE_ENUM, at), &scope);
        }
    }

    fn enumeration(&mut self, item: &prost_types::EnumDescriptorProto, path: &[i32], scope: &str) {
        self.add(Kind::Enum, format!("{scope}{}", item.name()), path);
        for (at, value) in (0..).zip(&item.value) {
            let name = format!("{scope}{}", value.name());
            self.add(Kind::EnumValue, name, &below(path, ENUM_VALUE, at));
        }
    }
}

/// One row of the table of errors.
struct Row {
    reason: ErrorReason,
    meaning: String,
    caller: String,
}

/// Takes the comments of the reasons apart: class and code, meaning, what the caller does.
fn rows() -> Vec<Row> {
    let comments = comments();
    let row = |reason: ErrorReason| {
        let name = reason.as_str_name();
        let comment = comments.iter().find(|c| c.name == name).expect("every reason is in the set");
        let head = format!("{}, {}. ", reason.class().label(), code_name(reason.grpc_code()));
        let rest = comment.text.strip_prefix(&head);
        let rest = rest.unwrap_or_else(|| panic!("the comment of {name} has to start with: {head}"));
        let (meaning, caller) =
            rest.split_once(" Caller: ").unwrap_or_else(|| panic!("the comment of {name} has to say what the caller does"));
        Row { reason, meaning: meaning.to_owned(), caller: caller.to_owned() }
    };
    ErrorReason::all().map(row).collect()
}

/// `InvalidArgument` as the specification of gRPC writes it: `INVALID_ARGUMENT`.
fn code_name(code: tonic::Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}

fn error_table() -> String {
    let mut table = String::from("| reason | class | code | meaning | what the caller does |\n|---|---|---|---|---|\n");
    for Row { reason, meaning, caller } in rows() {
        let name = reason.wire_name();
        let class = reason.class().label();
        let code = code_name(reason.grpc_code());
        writeln!(table, "| `{name}` | {class} | {code} | {meaning} | {caller} |").expect("a String takes everything");
    }
    table
}

#[test]
fn every_element_has_a_comment() {
    let bare: Vec<_> = comments().into_iter().filter(|c| c.text.is_empty()).map(|c| c.name).collect();
    assert!(bare.is_empty(), "{bare:#?}");
}

#[test]
fn every_field_says_whether_it_is_required() {
    let silent: Vec<_> = comments()
        .into_iter()
        .filter(|c| c.kind == Kind::Choice)
        .filter(|c| !c.text.starts_with("REQUIRED") && !c.text.starts_with("OPTIONAL. "))
        .map(|c| c.name)
        .collect();
    assert!(silent.is_empty(), "{silent:#?}");
}

#[test]
fn every_rpc_says_which_errors_it_returns_and_names_only_known_ones() {
    for rpc in comments().into_iter().filter(|c| matches!(c.kind, Kind::Method | Kind::Service)) {
        let (_, errors) = rpc.text.split_once("Errors").unwrap_or_else(|| panic!("{} has to say which errors it returns", rpc.name));
        let unknown: Vec<_> = errors
            .split(|c: char| !c.is_ascii_uppercase() && c != '_')
            .filter(|word| word.contains('_') && !word.ends_with('_'))
            .filter(|word| ErrorReason::from_wire_name(word).is_none())
            .collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", rpc.name);
    }
}

#[test]
fn every_reason_is_in_the_table_of_rust() {
    let in_proto = comments().into_iter().filter(|c| c.kind == Kind::EnumValue && c.name.starts_with("ERROR_REASON_")).count();
    // Less the zero value, which is never sent.
    assert_eq!(ErrorReason::all().count(), in_proto - 1);
}

#[test]
fn error_table_of_the_docs_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/contract.md");
    let text = std::fs::read_to_string(&file).expect("docs/contract.md is readable");
    let (before, rest) = text.split_once(TABLE_BEGIN).expect("the table has a begin marker");
    let (found, after) = rest.split_once(TABLE_END).expect("the table has an end marker");

    let wanted = error_table();
    if found == wanted {
        return;
    }
    assert!(std::env::var_os("UPDATE_DOCS").is_some(), "docs/contract.md is stale: UPDATE_DOCS=1 cargo test -p egress-provider-proto");
    let text = [before, TABLE_BEGIN, &wanted, TABLE_END, after].concat();
    std::fs::write(&file, text).expect("docs/contract.md is writable");
}
