use rstest::rstest;
use russh::keys::ssh_key::certificate::{Builder, CertType};
use russh::keys::{PrivateKey, PublicKey};

use super::*;

const NOW: u64 = 1_700_000_000;

/// The same seed gives the same key, so a table can name keys by a letter.
fn private(seed: u8) -> PrivateKey {
    PrivateKey::from(russh::keys::ssh_key::private::Ed25519Keypair::from_seed(&[seed; 32]))
}

fn public(seed: u8) -> PublicKey {
    private(seed).public_key().clone()
}

fn line(prefix: &str, seed: u8) -> String {
    format!("{prefix} {}\n", public(seed).to_openssh().expect("encodes"))
}

fn plain(seed: u8) -> PublicKeyOrCertificate {
    public(seed).into()
}

fn hashed(name: &str) -> String {
    let salt = [7_u8; 20];
    let hash: [u8; 20] = Hmac::<sha1::Sha1>::new_from_slice(&salt).expect("any length").chain_update(name).finalize().into_bytes().into();
    HostPatterns::HashedName { salt: salt.to_vec(), hash }.to_string()
}

struct Certified {
    authority: u8,
    kind: CertType,
    principals: &'static [&'static str],
    valid: (u64, u64),
    option: Option<&'static str>,
}

const GOOD: Certified = Certified { authority: 9, kind: CertType::Host, principals: &["hv1"], valid: (NOW - 10, NOW + 10), option: None };

fn certificate(seed: u8, about: &Certified) -> PublicKeyOrCertificate {
    let mut builder = Builder::new([1_u8; 16], public(seed), about.valid.0, about.valid.1).expect("valid times");
    builder.cert_type(about.kind).expect("set once");
    if about.principals.is_empty() {
        builder.all_principals_valid().expect("none yet");
    }
    for principal in about.principals {
        builder.valid_principal(*principal).expect("a name");
    }
    if let Some(option) = about.option {
        builder.critical_option(option, "").expect("set once");
    }
    builder.sign(&private(about.authority)).expect("signs").into()
}

#[rstest]
#[case::plain("hv1", 22, "hv1", Verdict::Trusted)]
#[case::list("other,hv1", 22, "hv1", Verdict::Trusted)]
#[case::host_in_upper_case("hv1", 22, "HV1", Verdict::Trusted)]
#[case::pattern_in_upper_case("HV1", 22, "hv1", Verdict::Trusted)]
#[case::star("hv*.example.org", 22, "hv12.example.org", Verdict::Trusted)]
#[case::question_mark("hv?", 22, "hv1", Verdict::Trusted)]
#[case::question_mark_is_one_character("hv?", 22, "hv12", Verdict::Unknown)]
#[case::negated("*,!hv1", 22, "hv1", Verdict::Unknown)]
#[case::negated_first("!hv1,*", 22, "hv1", Verdict::Unknown)]
#[case::negation_alone_matches_nobody("!hv2", 22, "hv1", Verdict::Unknown)]
#[case::another_host("hv2", 22, "hv1", Verdict::Unknown)]
#[case::port("[hv1]:2222", 2222, "hv1", Verdict::Trusted)]
#[case::another_port("[hv1]:2222", 2200, "hv1", Verdict::Unknown)]
#[case::port_is_not_the_default("[hv1]:2222", 22, "hv1", Verdict::Unknown)]
#[case::name_alone_is_good_at_any_port("hv1", 2222, "hv1", Verdict::Trusted)]
#[case::port_pattern("[127.0.0.*]:*", 2222, "127.0.0.9", Verdict::Trusted)]
#[case::ipv6("[fd00::1]:2222", 2222, "fd00::1", Verdict::Trusted)]
fn names_match(#[case] patterns: &str, #[case] port: u16, #[case] host: &str, #[case] expected: Verdict) {
    let known = KnownHosts::parse(&line(patterns, 1));
    assert_eq!(known.check(host, port, &plain(1), NOW), expected);
}

#[test]
fn a_hashed_name_matches_with_and_without_port() {
    let known = KnownHosts::parse(&format!("{}{}", line(&hashed("hv1"), 1), line(&hashed("[hv2]:2222"), 2)));
    assert_eq!(known.check("HV1", 22, &plain(1), NOW), Verdict::Trusted);
    assert_eq!(known.check("hv2", 2222, &plain(2), NOW), Verdict::Trusted);
    assert_eq!(known.check("hv2", 22, &plain(2), NOW), Verdict::Unknown);
}

#[test]
fn white_space_comments_and_broken_lines_hurt_no_other_line() {
    let text = format!("# a comment\n\n   \nhv1 ssh-ed25519 AAAAbroken\n@unknown hv1 x y\nhv1\n\t{}", line("hv1", 1).replace(' ', "\t  "));
    let known = KnownHosts::parse(&text.replace('\n', "\r\n"));
    assert_eq!(known.malformed(), 3);
    assert_eq!(known.check("hv1", 22, &plain(1), NOW), Verdict::Trusted);
}

#[test]
fn any_of_several_keys_of_one_type_is_trusted_and_another_is_changed() {
    let known = KnownHosts::parse(&format!("{}{}", line("hv1", 1), line("hv1", 2)));
    for seed in [1, 2] {
        assert_eq!(known.check("hv1", 22, &plain(seed), NOW), Verdict::Trusted);
    }
    assert_eq!(known.check("hv1", 22, &plain(3), NOW), Verdict::Changed);
}

#[test]
fn another_key_at_another_port_is_unknown_and_not_changed() {
    let known = KnownHosts::parse(&line("hv1", 1));
    assert_eq!(known.check("hv1", 2222, &plain(3), NOW), Verdict::Unknown);
}

#[test]
fn a_revoked_key_is_refused_even_where_a_plain_line_trusts_it() {
    for text in [format!("{}{}", line("hv1", 1), line("@revoked *", 1)), format!("{}{}", line("@revoked hv1", 1), line("hv1", 1))] {
        assert_eq!(KnownHosts::parse(&text).check("hv1", 22, &plain(1), NOW), Verdict::Revoked);
    }
}

#[test]
fn a_certificate_authority_does_not_vouch_for_a_bare_key() {
    let known = KnownHosts::parse(&line("@cert-authority *", 9));
    assert_eq!(known.check("hv1", 22, &plain(9), NOW), Verdict::Unknown);
    assert_eq!(known.check("hv1", 22, &plain(1), NOW), Verdict::Unknown);
}

#[rstest]
#[case::good(GOOD, None)]
#[case::principal_pattern(Certified { principals: &["other", "hv*"], ..GOOD }, None)]
#[case::foreign_authority(Certified { authority: 8, ..GOOD }, Some("authority"))]
#[case::user_certificate(Certified { kind: CertType::User, ..GOOD }, Some("no host certificate"))]
#[case::other_principal(Certified { principals: &["hv2"], ..GOOD }, Some("another host name"))]
#[case::all_principals(Certified { principals: &[], ..GOOD }, Some("another host name"))]
#[case::expired(Certified { valid: (NOW - 20, NOW), ..GOOD }, Some("not valid"))]
#[case::not_yet(Certified { valid: (NOW + 1, NOW + 10), ..GOOD }, Some("not valid"))]
#[case::critical_option(Certified { option: Some("force-command"), ..GOOD }, Some("critical option"))]
fn certificates_are_checked(#[case] about: Certified, #[case] fault: Option<&str>) {
    let known = KnownHosts::parse(&line("@cert-authority hv1,[hv1]:2222", 9));
    for port in [22, 2222] {
        match (known.check("hv1", port, &certificate(1, &about), NOW), fault) {
            (Verdict::Trusted, None) => {}
            (Verdict::BadCertificate(why), Some(fault)) => assert!(why.contains(fault), "{why}"),
            (verdict, _) => panic!("{verdict:?}"),
        }
    }
}

#[test]
fn a_certificate_of_an_authority_for_other_hosts_is_refused() {
    let known = KnownHosts::parse(&line("@cert-authority *.example.org", 9));
    assert!(matches!(known.check("hv1", 22, &certificate(1, &GOOD), NOW), Verdict::BadCertificate(_)));
}

#[test]
fn a_certificate_with_a_revoked_key_or_authority_is_revoked() {
    for revoked in [1, 9] {
        let known = KnownHosts::parse(&format!("{}{}", line("@cert-authority hv1", 9), line("@revoked *", revoked)));
        assert_eq!(known.check("hv1", 22, &certificate(1, &GOOD), NOW), Verdict::Revoked);
    }
}

#[test]
fn a_bad_certificate_around_a_known_key_is_that_known_key() {
    let known = KnownHosts::parse(&format!("{}{}", line("@cert-authority hv1", 9), line("hv1", 1)));
    let expired = certificate(1, &Certified { valid: (NOW - 20, NOW), ..GOOD });
    assert_eq!(known.check("hv1", 22, &expired, NOW), Verdict::Trusted);
}

#[test]
fn known_types_are_asked_for_first_and_certificates_only_with_an_authority() {
    let rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQC7";
    assert_eq!(KnownHosts::parse(&format!("hv1 {rsa}\n")).malformed(), 1, "a cut key is no key");
    let nothing = KnownHosts::default().wanted("hv1", 22);
    assert_eq!((nothing.keys, nothing.certificates), (algorithms(), Vec::new()));

    let ecdsa = Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 };
    let key = PrivateKey::random(&mut russh::keys::key::safe_rng(), ecdsa.clone()).expect("random key");
    let known = KnownHosts::parse(&format!("hv1 {}\n", key.public_key().to_openssh().expect("encodes")));
    let wanted = known.wanted("hv1", 22);
    assert_eq!(wanted.keys.first(), Some(&ecdsa));
    assert_eq!(wanted.keys.len(), algorithms().len());
    assert!(wanted.certificates.is_empty());
    assert_eq!(known.wanted("hv2", 22).keys, algorithms());

    let with_authority = KnownHosts::parse(&line("@cert-authority *", 9)).wanted("hv1", 22);
    assert_eq!(with_authority.certificates, algorithms());
}

proptest::proptest! {
    #[test]
    fn no_file_panics(text in ".{0,400}") {
        let known = KnownHosts::parse(&text);
        known.check("hv1", 22, &plain(1), NOW);
        known.wanted("hv1", 2222);
    }
}
