//! Results on stdout: tables for people, the contract's messages as JSON for programs.

use std::io::Write as _;

use comfy_table::{ContentArrangement, Table, presets};
use egress_provider_proto::{FILE_DESCRIPTOR_SET, v1};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions};

use super::{Exit, Failure};

/// A line on stdout. A reader that went away (`| head`) has seen what it wanted.
pub(super) fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The message of that name in protobuf's JSON form, fields that are not set included.
pub(super) fn json(name: &str, message: &impl Message) -> Result<String, Failure> {
    let broken = |e: &dyn std::fmt::Display| Failure::new(Exit::Other, format!("the answer cannot be shown as JSON: {e}"));
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).map_err(|e| broken(&e))?;
    let descriptor = pool
        .get_message_by_name(&format!("egressproxies.provider.v1.{name}"))
        .ok_or_else(|| broken(&format!("{name} is not in the contract")))?;
    let dynamic = DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice()).map_err(|e| broken(&e))?;
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::pretty(&mut text);
    dynamic.serialize_with_options(&mut serializer, &SerializeOptions::new().skip_default_fields(false)).map_err(|e| broken(&e))?;
    String::from_utf8(text).map_err(|e| broken(&e))
}

/// Rows under a heading, without lines: easy to read and to cut.
pub(super) fn table<const N: usize>(heading: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(heading);
    table.add_rows(rows);
    table.trim_fmt()
}

/// `WORD` of `INSTANCE_STATE_WORD`.
fn short(name: &'static str, prefix: &str) -> &'static str {
    name.strip_prefix(prefix).unwrap_or(name)
}

pub(super) fn state(instance: &v1::Instance) -> String {
    let state = short(instance.state().as_str_name(), "INSTANCE_STATE_");
    match instance.state_reason() {
        v1::StateReason::Unspecified => state.to_owned(),
        reason => format!("{state} ({})", short(reason.as_str_name(), "STATE_REASON_")),
    }
}

pub(super) fn phase(instance: &v1::Instance) -> String {
    short(instance.phase().as_str_name(), "INSTANCE_PHASE_").to_owned()
}

pub(super) fn check_reason(row: &v1::HostCheck) -> String {
    short(row.reason().as_str_name(), "CHECK_REASON_").to_owned()
}

pub(super) fn image_state(image: &v1::Image) -> String {
    let state = short(image.state().as_str_name(), "IMAGE_STATE_");
    if image.state() == v1::ImageState::Pulling {
        format!("{state} {}", progress(image.bytes_done, image.bytes_total))
    } else {
        state.to_owned()
    }
}

pub(super) fn orphan_kind(volume: &v1::OrphanVolume) -> &'static str {
    short(volume.kind().as_str_name(), "KIND_")
}

/// `40 % of 413.6 MiB`, or what is known of it.
pub(super) fn progress(done: u64, total: u64) -> String {
    // done * 100 would overflow for sizes that a broken server may claim
    let percent = |done: u64, total: u64| u128::from(done) * 100 / u128::from(total);
    match total {
        0 => bytes(done),
        total => format!("{} % of {}", percent(done, total).min(100), bytes(total)),
    }
}

pub(super) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

/// The address that a client would use, or the first one there is.
pub(super) fn address(instance: &v1::Instance) -> String {
    let primary = instance.addresses.iter().find(|a| a.primary).or(instance.addresses.first());
    primary.map_or_else(|| "-".into(), |a| a.ip.clone())
}

pub(super) fn time(at: Option<&prost_types::Timestamp>) -> String {
    let time = at.and_then(|t| jiff::Timestamp::new(t.seconds, t.nanos).ok());
    time.map_or_else(|| "-".into(), |t| t.round(jiff::Unit::Second).unwrap_or(t).to_string())
}

pub(super) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { text.to_owned() }
}

/// What `get` and `create` show for a person.
pub(super) fn instance(instance: &v1::Instance) -> String {
    let mut lines = vec![
        ("name", instance.name.clone()),
        ("id", instance.instance_id.clone()),
        ("state", state(instance)),
        ("address", address(instance)),
        ("host", instance.host.clone()),
        ("uid", or_dash(&instance.uid)),
        ("created", time(instance.created_at.as_ref())),
    ];
    if !instance.state_message.is_empty() {
        lines.push(("detail", instance.state_message.clone()));
    }
    if let Some(error) = &instance.last_error {
        lines.push(("last error", format!("{}: {}", error.reason, error.message)));
    }
    lines.iter().map(|(name, value)| format!("{name:<10} {value}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_contracts_names_and_shows_what_is_not_set() {
        let message = v1::GetResponse {
            instance: Some(v1::Instance {
                instance_id: "hosts/hv1/domains/a".into(),
                state: v1::InstanceState::Running.into(),
                created_at: Some(prost_types::Timestamp { seconds: 0, nanos: 0 }),
                ..Default::default()
            }),
        };
        let value: serde_json::Value = serde_json::from_str(&json("GetResponse", &message).expect("it is in the contract")).expect("JSON");
        let instance = &value["instance"];
        assert_eq!(instance["instanceId"], "hosts/hv1/domains/a");
        assert_eq!(instance["state"], "INSTANCE_STATE_RUNNING");
        assert_eq!(instance["createdAt"], "1970-01-01T00:00:00Z");
        assert_eq!(instance["uid"], "");
    }

    #[test]
    fn sizes_and_progress_are_readable_at_both_ends() {
        assert_eq!((bytes(0), bytes(1536), bytes(u64::MAX)), ("0 B".into(), "1.5 KiB".into(), "16384.0 PiB".into()));
        assert_eq!((progress(5, 0), progress(1, 4)), ("5 B".into(), "25 % of 4 B".into()));
        assert_eq!(progress(u64::MAX, u64::MAX), "100 % of 16384.0 PiB");
    }

    #[test]
    fn a_table_has_a_heading_and_no_trailing_blanks() {
        let text = table(["NAME", "STATE"], [["web-1".to_owned(), "RUNNING".to_owned()]]);
        assert!(text.lines().all(|l| l == l.trim_end()), "{text:?}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
