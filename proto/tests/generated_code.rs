//! The committed code is what the `.proto` files give, and the descriptor set is whole.

use std::path::Path;

use egress_provider_proto::FILE_DESCRIPTOR_SET;
use protox::prost_reflect::{DescriptorPool, Value};

#[path = "../examples/generate/codegen.rs"]
mod codegen;

#[test]
fn generated_code_is_current() {
    let fresh = tempfile::tempdir().expect("a temporary directory");
    codegen::generate(fresh.path()).expect("the contract compiles");

    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gen");
    for name in codegen::GENERATED {
        let wanted = std::fs::read(fresh.path().join(name)).expect("just generated");
        let found = std::fs::read(committed.join(name)).unwrap_or_default();
        assert!(wanted == found, "src/gen/{name} is stale: cargo run -p egress-provider-proto --example generate");
    }
}

#[test]
fn descriptor_set_is_self_contained_and_marks_user_data_as_secret() {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("every import is in the set");
    let services: Vec<_> = pool.services().map(|service| service.full_name().to_owned()).collect();
    assert_eq!(services, ["egressproxies.provider.v1.ImageService", "egressproxies.provider.v1.ProviderService"]);

    let cloud_init = pool.get_message_by_name("egressproxies.provider.v1.CloudInit").expect("CloudInit is in the set");
    let options = cloud_init.get_field_by_name("user_data").expect("user_data is a field").options();
    let redact = options.get_field_by_name("debug_redact").expect("a known option");
    assert_eq!(*redact, Value::Bool(true));
}
