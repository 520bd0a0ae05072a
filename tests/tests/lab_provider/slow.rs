//! Paths that are bad without being broken.

use std::time::Duration;

use lab_tests::case::{request, uid_of};
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, FaultProxy, ImageServer};
use serde_json::json;

const HOST: &str = "hv2";
/// Of a path so slow that the image below takes longer than a silent host is waited for (15 s).
const BYTES_PER_SECOND: u32 = 200 << 10;
const IMAGE_MIB: usize = 4;
/// One way.
const FAR: Duration = Duration::from_millis(150);

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_and_distant_host_is_not_taken_for_a_silent_one() {
    let Some(case) = Case::start("slow", &[HOST]) else { return };
    let host = case.host(HOST);
    let proxy = FaultProxy::slow(format!("{}:{}", host.address, host.port), BYTES_PER_SECOND).await;
    proxy.delay(FAR);
    let server = ImageServer::start().await;
    let image = ScratchImage::filled(case.dir(), "i.qcow2", IMAGE_MIB, 7);
    server.serve("i.qcow2", image.bytes(), [Answer::Whole]);
    let entry = case
        .entry()
        .via(HOST, proxy.addr())
        .image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let daemon = case.daemon(entry).await;
    let clients = daemon.clients();
    let vm = case.vm("a");

    let creating = {
        let (clients, request) = (clients.clone(), request(&vm, HOST, "i"));
        tokio::spawn(async move { clients.create(request).await })
    };
    // the control link has its own session: its callers do not wait behind the image
    let mut meanwhile = 0;
    while !creating.is_finished() {
        clients.list_complete().await.expect("listed");
        meanwhile += 1;
    }
    creating.await.expect("its task").expect("created");
    assert!(meanwhile > 1, "the listings waited for the image");
    assert_eq!(server.gets("i.qcow2"), 1, "the image was fetched once");
    // the control link and that of the upload
    assert_eq!(proxy.counts().connections, 2, "no link was dialled again");
    clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("deleted");
}
