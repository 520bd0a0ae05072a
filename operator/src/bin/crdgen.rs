//! Prints the resource definitions as YAML: what deploy/crd holds.

use egress_operator::crd::{ProviderHealth, Proxy};
use kube::CustomResourceExt;

fn main() -> anyhow::Result<()> {
    for crd in [Proxy::crd(), ProviderHealth::crd()] {
        println!("---\n{}", serde_saphyr::to_string(&crd)?.trim_end());
    }
    Ok(())
}
