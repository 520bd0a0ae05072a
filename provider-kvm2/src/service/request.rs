//! Requests of the contract turned into the provider's own words.
//!
//! Every rule that the contract states about a field is checked here, and all
//! violations of a request are reported together. A rule's text never repeats the
//! value: user-data and URLs may be secret.

use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1;
use secrecy::SecretSlice;

use super::deadline::Deadline;
use super::status::{Fault, Violation};
use crate::config::{Config, Entry};
use crate::domain::names;
use crate::error::{ProviderError, Reason};
use crate::provider::{Completeness, CreateRequest, DeleteRequest, Key, ListRequest, Placement, Selector, UnknownHost};

/// Longest name of an instance.
pub const MAX_NAME: usize = names::MAX_NAME_LEN;
/// Largest user-data. Far above what people write, far below what a seed image may hold.
pub const MAX_USER_DATA: usize = 1 << 20;
/// Most instances in one page.
pub const MAX_PAGE: i32 = 1000;

const MAX_WORD: usize = 63;
const MAX_IMAGE: usize = 2048;
const MAX_SPEC_HASH: usize = 128;
const MAX_PAGE_TOKEN: usize = 1024;
const MAX_INSTANCE_ID: usize = 320;
/// What a Create waits when its caller does not say.
const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(25);
/// No caller waits longer; it also keeps sums of times far from overflowing.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
const DEFAULT_CHECK: Duration = Duration::from_secs(10);
const LONGEST_CHECK: Duration = Duration::from_secs(300);

/// The entry that a request means.
pub(super) fn entry(config: &Config, name: &str) -> Result<Arc<Entry>, Fault> {
    let names = || config.entries.iter().map(|e| e.name.as_str()).collect::<Vec<_>>().join(", ");
    if name.is_empty() {
        return match &config.entries[..] {
            [only] => Ok(Arc::clone(only)),
            _ => Err(ProviderError::invalid(
                Reason::EntryRequired,
                "entry",
                format!("entry is empty and more than one is configured: name one of {}", names()),
            )
            .into()),
        };
    }
    let found = config.entries.iter().find(|e| e.name == name).cloned();
    found.ok_or_else(|| {
        ProviderError::invalid(Reason::EntryUnknown, "entry", format!("no such provider entry is configured: use one of {}", names()))
            .into()
    })
}

/// The host that the zone of an image request means.
pub(super) fn host(entry: &Entry, zone: &str) -> Result<String, Fault> {
    let names = || entry.hosts.iter().map(|h| h.name.as_str()).collect::<Vec<_>>().join(", ");
    if zone.is_empty() {
        return match &entry.hosts[..] {
            [only] => Ok(only.name.clone()),
            _ => Err(ProviderError::invalid(
                Reason::ZoneRequired,
                "zone",
                format!("zone is empty and the entry has more than one host: name one of {}", names()),
            )
            .into()),
        };
    }
    known_zone(entry, zone).map(|()| zone.to_owned())
}

/// An empty zone means every host.
pub(super) fn known_zone(entry: &Entry, zone: &str) -> Result<(), Fault> {
    if zone.is_empty() || entry.host(zone).is_some() {
        return Ok(());
    }
    let names: Vec<_> = entry.hosts.iter().map(|h| h.name.as_str()).collect();
    Err(ProviderError::invalid(Reason::ZoneUnknown, "zone", format!("zone is no configured host: use one of {}", names.join(", "))).into())
}

/// Collects what is wrong with a request.
#[derive(Debug, Default)]
struct Rules(Vec<Violation>);

impl Rules {
    fn broken(&mut self, field: &str, reason: Reason, rule: impl Into<String>) {
        self.0.push(Violation { field: field.to_owned(), reason, rule: rule.into() });
    }

    fn end<T>(self, value: T) -> Result<T, Fault> {
        if self.0.is_empty() { Ok(value) } else { Err(Fault::Rejected(self.0)) }
    }

    fn length(&mut self, field: &str, value: &str, most: usize) {
        if value.len() > most {
            self.broken(field, Reason::FieldInvalid, format!("has more than {most} bytes"));
        }
    }

    /// Letters, digits and `extra`; empty is fine.
    fn word(&mut self, field: &str, value: &str, most: usize, extra: &str, reason: Reason) {
        if value.len() > most {
            self.broken(field, reason, format!("has more than {most} bytes"));
        } else if !value.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(c)) {
            self.broken(field, reason, format!("has other characters than letters, digits and any of {extra}"));
        }
    }

    fn name(&mut self, field: &str, value: &str) {
        let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        if value.is_empty() {
            self.broken(field, Reason::NameInvalid, "is required");
        } else if value.len() > MAX_NAME {
            self.broken(field, Reason::NameInvalid, format!("has more than {MAX_NAME} bytes"));
        } else if !value.chars().all(|c| edge(c) || matches!(c, '-' | '.')) || !value.starts_with(edge) || !value.ends_with(edge) {
            self.broken(field, Reason::NameInvalid, "has to be lower-case letters, digits, - and ., with a letter or digit first and last");
        } else if value.starts_with(names::BASE_PREFIX) {
            self.broken(field, Reason::NameInvalid, format!("begins with {}, which is kept for images", names::BASE_PREFIX));
        }
    }

    fn uid(&mut self, field: &str, value: &str) {
        if value.is_empty() {
            self.broken(field, Reason::UidInvalid, "is required");
        }
        self.word(field, value, MAX_WORD, "-_.", Reason::UidInvalid);
    }

    fn installation(&mut self, field: &str, value: &str) {
        self.word(field, value, MAX_WORD, "-_.", Reason::FieldInvalid);
    }

    fn image(&mut self, field: &str, value: &str) {
        if value.is_empty() {
            self.broken(field, Reason::FieldInvalid, "is required");
        } else if value.len() > MAX_IMAGE {
            self.broken(field, Reason::FieldInvalid, format!("has more than {MAX_IMAGE} bytes"));
        } else if value.chars().any(char::is_control) {
            self.broken(field, Reason::FieldInvalid, "has control characters");
        }
    }

    /// Of a duration: not negative and well formed. Longer ones than `longest` count as `longest`.
    fn wait(&mut self, field: &str, value: Option<&prost_types::Duration>, default: Duration, longest: Duration) -> Duration {
        let Some(value) = value else { return default };
        match Duration::try_from(*value) {
            Ok(wait) => wait.min(longest),
            Err(_) => {
                self.broken(field, Reason::FieldInvalid, "is negative or no duration");
                default
            }
        }
    }

    fn page(&mut self, size: i32, token: &str) -> u32 {
        if size < 0 {
            self.broken("page_size", Reason::FieldInvalid, "is negative");
        }
        self.length("page_token", token, MAX_PAGE_TOKEN);
        let size = if size <= 0 { MAX_PAGE } else { size.min(MAX_PAGE) };
        size.unsigned_abs()
    }
}

pub(super) fn create(entry: &Entry, request: v1::CreateRequest, deadline: Option<Deadline>) -> Result<CreateRequest, Fault> {
    // taken apart, so that a field that is not looked at does not compile
    let v1::CreateRequest { entry: _, name, uid, installation_id, placement, cloud_init, spec_hash, max_wait, port } = request;
    let mut rules = Rules::default();
    rules.name("name", &name);
    rules.uid("uid", &uid);
    rules.installation("installation_id", &installation_id);
    if placement.is_none() {
        rules.broken("placement", Reason::FieldInvalid, "is required");
    }
    let v1::Placement { zone, region, machine_type, image } = placement.clone().unwrap_or_default();
    if placement.is_some() {
        rules.length("placement.zone", &zone, MAX_WORD);
        rules.length("placement.region", &region, MAX_WORD);
        if machine_type.is_empty() {
            rules.broken("placement.machine_type", Reason::FieldInvalid, "is required");
        }
        rules.length("placement.machine_type", &machine_type, MAX_WORD);
        rules.image("placement.image", &image);
    }
    let user_data = cloud_init.map(|c| c.user_data).unwrap_or_default();
    if user_data.len() > MAX_USER_DATA {
        rules.broken("cloud_init.user_data", Reason::UserDataTooLarge, format!("has {} bytes, more than {MAX_USER_DATA}", user_data.len()));
    }
    rules.word("spec_hash", &spec_hash, MAX_SPEC_HASH, ":-_.", Reason::FieldInvalid);
    let mut max_wait = rules.wait("max_wait", max_wait.as_ref(), DEFAULT_MAX_WAIT, LONGEST_WAIT);
    if let Some(deadline) = deadline {
        max_wait = max_wait.min(deadline.wait_budget());
    }
    if port > 65535 {
        rules.broken("port", Reason::FieldInvalid, "is more than 65535");
    }
    let user_data: SecretSlice<u8> = user_data.into();
    rules.end(CreateRequest {
        entry: entry.name.clone(),
        key: Key { name, uid, installation_id },
        placement: Placement { zone, region, machine_type, image },
        user_data: Arc::new(user_data),
        spec_hash,
        max_wait,
    })
}

fn by_id(id: v1::InstanceById) -> Result<Selector, Fault> {
    let v1::InstanceById { instance_id, uid, installation_id } = id;
    let mut rules = Rules::default();
    if instance_id.is_empty() {
        rules.broken("id.instance_id", Reason::IdMalformed, "is required");
    } else if instance_id.len() > MAX_INSTANCE_ID {
        rules.broken("id.instance_id", Reason::IdMalformed, format!("has more than {MAX_INSTANCE_ID} bytes"));
    }
    rules.word("id.uid", &uid, MAX_WORD, "-_.", Reason::UidInvalid);
    rules.installation("id.installation_id", &installation_id);
    rules.end(Selector::Id { id: instance_id, expected_uid: uid, expected_installation: installation_id })
}

fn by_key(key: v1::InstanceKey) -> Result<Selector, Fault> {
    let v1::InstanceKey { name, uid, installation_id, zone } = key;
    let mut rules = Rules::default();
    rules.name("key.name", &name);
    rules.uid("key.uid", &uid);
    rules.installation("key.installation_id", &installation_id);
    rules.length("key.zone", &zone, MAX_WORD);
    rules.end(Selector::Key { key: Key { name, uid, installation_id }, zone })
}

fn no_selector() -> Fault {
    Fault::Rejected(vec![Violation { field: "selector".into(), reason: Reason::FieldInvalid, rule: "is required: give id or key".into() }])
}

pub(super) fn get(selector: Option<v1::get_request::Selector>) -> Result<Selector, Fault> {
    match selector.ok_or_else(no_selector)? {
        v1::get_request::Selector::Id(id) => by_id(id),
        v1::get_request::Selector::Key(key) => by_key(key),
    }
}

pub(super) fn delete(entry: &Entry, request: v1::DeleteRequest) -> Result<DeleteRequest, Fault> {
    let v1::DeleteRequest { entry: _, selector, abandon_unknown_host } = request;
    let selector = match selector.ok_or_else(no_selector)? {
        v1::delete_request::Selector::Id(id) => by_id(id),
        v1::delete_request::Selector::Key(key) => by_key(key),
    }?;
    let unknown_host = if abandon_unknown_host { UnknownHost::Abandon } else { UnknownHost::Refuse };
    Ok(DeleteRequest { entry: entry.name.clone(), selector, unknown_host })
}

pub(super) fn list(entry: &Entry, request: v1::ListByTagRequest) -> Result<ListRequest, Fault> {
    let v1::ListByTagRequest { entry: _, installation_id, page_size, page_token, require_complete } = request;
    let mut rules = Rules::default();
    rules.installation("installation_id", &installation_id);
    let page_size = rules.page(page_size, &page_token);
    let completeness = if require_complete { Completeness::Required } else { Completeness::BestEffort };
    rules.end(ListRequest { entry: entry.name.clone(), installation_id, page_size, page_token, completeness })
}

/// How long a Check may take.
pub(super) fn check(timeout: Option<&prost_types::Duration>, deadline: Option<Deadline>) -> Result<Duration, Fault> {
    let mut rules = Rules::default();
    let wanted = rules.wait("timeout", timeout, DEFAULT_CHECK, Duration::MAX);
    if wanted.is_zero() || wanted > LONGEST_CHECK {
        rules.broken("timeout", Reason::FieldInvalid, "has to be more than zero and at most 300 s");
    }
    rules.end(deadline.map_or(wanted, |d| wanted.min(d.wait_budget())))
}

/// An image on a host, as GetImage asks for it.
pub(super) fn image(zone: &str, image: &str) -> Result<(), Fault> {
    let mut rules = Rules::default();
    rules.length("zone", zone, MAX_WORD);
    rules.image("image", image);
    rules.end(())
}

/// The size of a page of images.
pub(super) fn image_page(request: &v1::ListImagesRequest) -> Result<usize, Fault> {
    let mut rules = Rules::default();
    rules.length("zone", &request.zone, MAX_WORD);
    let size = rules.page(request.page_size, &request.page_token);
    rules.end(size as usize)
}

#[cfg(test)]
#[path = "request/tests.rs"]
mod tests;
