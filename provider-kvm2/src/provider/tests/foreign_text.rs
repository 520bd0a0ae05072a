//! What hosts, guests and their administrators put into names and messages, through each operation.

use super::*;
use crate::domain::mark::NAMESPACE;
use crate::error::MAX_FOREIGN_TEXT;

/// Clears a terminal, turns text around, breaks a line, and is long.
fn hostile(start: &str) -> String {
    format!("{start}\u{1b}[2J\u{1b}]0;x\u{7}\u{202e}\u{2028}\r\n\0{}", "<é>".repeat(2000))
}

/// As hostile as XML lets a name be.
fn hostile_name(start: &str) -> String {
    format!("{start}\u{202e}\u{200b}\u{2028}\u{85}{}", "é".repeat(2000))
}

#[track_caller]
fn assert_clean(what: &str, text: &str, limit: usize) {
    let bad = |c: char| c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    assert!(!text.contains(bad), "{what}: {text:.200?}");
    assert!(text.len() <= limit, "{what}: {} bytes: {text:.200?}", text.len());
}

#[track_caller]
fn assert_clean_error(what: &str, error: &ProviderError) {
    // the message and at most two causes
    assert_clean(what, &error.chain(), 4 * MAX_FOREIGN_TEXT);
    assert_clean(what, &format!("{error:?}"), 4 * MAX_FOREIGN_TEXT + 64);
    for value in error.metadata().values() {
        assert_clean(what, value, MAX_FOREIGN_TEXT);
    }
}

/// The calls that the operations make.
const CALLS: [&str; 18] = [
    "hostname",
    "lib_version",
    "domain_capabilities",
    "has_interface",
    "lookup_domain",
    "list_domains",
    "define_domain",
    "start_domain",
    "destroy_domain",
    "undefine_domain",
    "domain_state",
    "domain_metadata",
    "lookup_pool",
    "refresh_pool",
    "list_volumes",
    "volume_info",
    "create_volume",
    "delete_volume",
];

#[tokio::test(start_paused = true)]
async fn a_message_of_libvirt_is_bounded_and_stripped_whichever_call_it_comes_from() {
    let mut seen = 0;
    for call in CALLS {
        for failure in [
            CallFailure::Libvirt { code: 1, domain: 10, message: hostile("internal error: ") },
            CallFailure::BadAnswer { what: hostile("what: ") },
            CallFailure::LinkDead { cause: hostile("gone: ") },
        ] {
            let fail = |bench: &Bench| {
                bench.host.calls();
                bench.host.fail_next(call, failure.clone());
            };
            let bench = Bench::warm();
            let provider = bench.daemon("a");
            fail(&bench);
            let created = provider.create(create("vm-1", "u1")).await;
            fail(&bench);
            let got = provider.get("", by_key("vm-1", "u1")).await;
            fail(&bench);
            let listed = provider.list(ListRequest { completeness: Completeness::BestEffort, ..list() }).await;
            fail(&bench);
            let checked = provider.check("", Duration::ZERO).await.expect("rows");
            fail(&bench);
            let deleted = provider.delete(delete(by_key("vm-1", "u1"))).await;
            let mut errors: Vec<_> = [created.err(), got.err(), deleted.err()].into_iter().flatten().collect();
            match listed {
                Ok(page) => errors.extend(page.unreachable.into_iter().chain(page.unreadable.into_iter().map(|u| u.error))),
                Err(e) => errors.push(e),
            }
            errors.extend(checked.into_iter().filter_map(|row| row.problem));
            seen += errors.len();
            for error in errors {
                assert_clean_error(call, &error);
            }
        }
    }
    assert!(seen > CALLS.len(), "{seen} errors only");
}

#[tokio::test(start_paused = true)]
async fn names_that_others_gave_on_the_host_are_bounded_and_stripped() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let link = bench.host.link();
    let key = link.lookup_volume(&link.lookup_pool("default").await.expect("pool"), "vm-1.qcow2").await.expect("volume").key;
    let domain = link.lookup_domain("vm-1").await.expect("there");
    link.destroy_domain(&domain).await.expect("stopped");
    link.undefine_domain(&domain).await.expect("undefined by hand");
    let document = |name: &str, mark: &str, disk: &str| {
        format!(
            "<domain type='qemu'><name>{name}</name><metadata>{mark}</metadata><memory>1</memory><vcpu>1</vcpu><os><type>hvm</type></os>\
             <devices><disk type='file' device='disk'><source file='{disk}'/><target dev='vda'/></disk></devices></domain>"
        )
    };
    // one that uses our volume, and one whose mark nobody can read
    link.define_domain(&document(&hostile_name("user"), "", &key)).await.expect("defined");
    let mark = format!("<instance xmlns='{NAMESPACE}'><managed>true</managed><phase>{}</phase></instance>", hostile_name(""));
    link.define_domain(&document(&hostile_name("broken"), &mark, "/dev/null")).await.expect("defined");
    bench.host.put_volume("default", &format!("base-lab-{}-01234567.qcow2", hostile_name("")), b"x");

    let by_id = Selector::Id { id: "hosts/hv1/domains/vm-1".into(), expected_uid: "u1".into(), expected_installation: String::new() };
    let conflict = provider.delete(delete(by_id)).await.expect_err("in use");
    assert_eq!(conflict.reason(), Reason::VolumeConflict);
    assert_clean_error("a domain that uses a volume", &conflict);

    let page = provider.list(ListRequest { completeness: Completeness::BestEffort, ..list() }).await.expect("listed");
    let [unreadable] = &page.unreadable[..] else { panic!("{:?}", page.unreadable) };
    assert_clean("a domain with a broken mark", &unreadable.name, 255);
    assert_clean_error("a domain with a broken mark", &unreadable.error);
    for orphan in &page.orphan_volumes {
        assert_clean("a volume", &orphan.name, 255);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_guest_says_of_its_interfaces_is_bounded_and_stripped() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let address = |n: u32| std::net::IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
    let interface = |n: u32| GuestInterface { name: hostile("eth"), mac: hostile("52:54:00"), addresses: (0..n).map(address).collect() };
    bench.host.set_interfaces("vm-1", AddressSource::Agent, Ok((0..500).map(|_| interface(500)).collect()));
    let got = provider.get("", by_key("vm-1", "u1")).await.expect("read");
    assert!(!got.addresses.is_empty() && got.addresses.len() <= 64, "{}", got.addresses.len());
    for address in &got.addresses {
        assert_clean("a MAC", &address.mac, 17);
    }
    assert_clean("the state", &got.state_message, 2 * MAX_FOREIGN_TEXT);
}
