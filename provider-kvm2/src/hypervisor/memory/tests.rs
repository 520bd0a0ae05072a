use super::*;

const GIB: u64 = 1 << 30;

fn volume_xml(name: &str, capacity: u64, allocation: u64, format: &str) -> String {
    format!(
        "<volume><name>{name}</name><capacity unit='bytes'>{capacity}</capacity><allocation unit='bytes'>{allocation}</allocation>\
         <target><format type='{format}'/></target></volume>"
    )
}

async fn pool(link: &MemoryLink) -> PoolRef {
    link.lookup_pool("default").await.expect("the pool exists")
}

fn code_of<T: fmt::Debug>(result: CallResult<T>) -> Option<i32> {
    result.expect_err("the call is refused").code()
}

fn data(bytes: &'static [u8]) -> UploadPart {
    UploadPart::Data(Bytes::from_static(bytes))
}

async fn upload(link: &MemoryLink, volume: &VolumeRef, length: u64, parts: Vec<UploadPart>) -> CallResult<u64> {
    let (tx, rx) = mpsc::channel(16);
    for part in parts {
        tx.send(part).await.expect("the queue is long enough");
    }
    drop(tx);
    link.upload(volume, length, rx, Duration::from_secs(60)).await
}

#[tokio::test]
async fn volumes_are_refused_as_libvirt_refuses_them() {
    let host = MemoryHost::new("hv1");
    let link = host.link();
    assert_eq!(code_of(link.lookup_pool("none").await), Some(code::NO_STORAGE_POOL));
    let pool = pool(&link).await;
    let volume = link.create_volume(&pool, &volume_xml("a.raw", 10, 10, "raw")).await.unwrap();
    assert_eq!(volume.key, "/pools/default/a.raw");
    assert_eq!(code_of(link.create_volume(&pool, &volume_xml("a.raw", 10, 10, "raw")).await), Some(code::STORAGE_VOL_EXIST));
    assert_eq!(code_of(link.create_volume(&pool, &volume_xml("b.raw", 1, 200 * GIB, "raw")).await), Some(code::SYSTEM_ERROR));
    host.put_unseen_file("default", "c.raw", b"x");
    assert_eq!(code_of(link.create_volume(&pool, &volume_xml("c.raw", 10, 0, "raw")).await), Some(code::OPERATION_INVALID));
    assert_eq!(code_of(link.create_volume(&pool, "<volume><name>d").await), Some(code::XML_DETAIL));
    assert_eq!(code_of(link.lookup_volume(&pool, "d").await), Some(code::NO_STORAGE_VOL));
    link.delete_volume(&volume).await.unwrap();
    assert_eq!(code_of(link.delete_volume(&volume).await), Some(code::NO_STORAGE_VOL));
    assert_eq!(link.pool_info(&pool).await.unwrap().available, 100 * GIB);
}

#[tokio::test]
async fn an_overlay_without_capacity_takes_its_bases_and_needs_the_base() {
    let host = MemoryHost::new("hv1");
    let link = host.link();
    let pool = pool(&link).await;
    link.create_volume(&pool, &volume_xml("base.qcow2", 5 * GIB, 0, "qcow2")).await.unwrap();
    let xml = |base: &str| {
        format!(
            "<volume><name>o.qcow2</name><target><format type='qcow2'/></target>\
             <backingStore><path>/pools/default/{base}</path></backingStore></volume>"
        )
    };
    assert_eq!(code_of(link.create_volume(&pool, &xml("none")).await), Some(code::SYSTEM_ERROR));
    let overlay = link.create_volume(&pool, &xml("base.qcow2")).await.unwrap();
    assert_eq!(link.volume_info(&overlay).await.unwrap().capacity, 5 * GIB);
}

#[tokio::test]
async fn an_upload_past_its_length_or_without_its_end_is_aborted() {
    let host = MemoryHost::new("hv1");
    let link = host.link();
    let pool = pool(&link).await;
    let volume = link.create_volume(&pool, &volume_xml("a.raw", 4, 4, "raw")).await.unwrap();
    assert_eq!(upload(&link, &volume, 4, vec![data(b"ab"), data(b"cd"), UploadPart::Finish]).await.unwrap(), 4);
    assert_eq!(link.download(&volume, 3).await.unwrap().as_ref(), b"abc");
    let over = upload(&link, &volume, 4, vec![data(b"abcde"), UploadPart::Finish]).await.unwrap_err();
    assert!(matches!(over.kind, CallFailure::BadAnswer { .. }), "{over:?}");
    let cut = upload(&link, &volume, 4, vec![data(b"ab")]).await.unwrap_err();
    assert!(matches!(cut.kind, CallFailure::SourceAborted), "{cut:?}");
    assert_eq!((host.open_streams(), host.crashes()), (0, 0));
}

#[tokio::test]
async fn a_write_without_room_takes_libvirtd_and_every_link_down() {
    let host = MemoryHost::new("hv1");
    host.add_pool("small", 4);
    let (link, other) = (host.link(), host.link());
    let pool = link.lookup_pool("small").await.unwrap();
    let volume = link.create_volume(&pool, &volume_xml("a.raw", 8, 0, "raw")).await.unwrap();
    let e = upload(&link, &volume, 8, vec![data(b"abcdefgh"), UploadPart::Finish]).await.unwrap_err();
    assert!(matches!(e.kind, CallFailure::LinkDead { .. }), "{e:?}");
    assert_eq!((host.crashes(), other.is_alive()), (1, false));
    assert!(host.link().lookup_pool("small").await.is_ok(), "a new link reaches the restarted daemon");
}

#[tokio::test]
async fn domains_are_refused_as_libvirt_refuses_them() {
    let host = MemoryHost::new("hv1");
    host.set_bridges(&["br0"]);
    let link = host.link();
    let xml = |uuid: u128, bridge: &str| {
        format!(
            "<domain><name>vm</name><uuid>{}</uuid><metadata><m:mark xmlns:m='urn:m'><a/></m:mark></metadata>\
             <devices><interface type='bridge'><source bridge='{bridge}'/></interface></devices></domain>",
            Uuid::from_u128(uuid)
        )
    };
    assert_eq!(code_of(link.lookup_domain("vm").await), Some(code::NO_DOMAIN));
    let domain = link.define_domain(&xml(1, "br1")).await.unwrap();
    assert_eq!(code_of(link.define_domain(&xml(2, "br0")).await), Some(code::OPERATION_FAILED));
    assert_eq!(code_of(link.start_domain(&domain).await), Some(code::SYSTEM_ERROR));
    let domain = link.define_domain(&xml(1, "br0")).await.unwrap();
    assert_eq!(code_of(link.destroy_domain(&domain).await), Some(code::OPERATION_INVALID));
    link.start_domain(&domain).await.unwrap();
    assert_eq!(code_of(link.start_domain(&domain).await), Some(code::OPERATION_INVALID));
    assert_eq!(link.domain_metadata(&domain, "urn:m").await.unwrap().as_deref(), Some("<m:mark xmlns:m='urn:m'><a/></m:mark>"));
    assert_eq!(link.domain_metadata(&domain, "urn:other").await.unwrap(), None);
    link.set_domain_metadata(&domain, "urn:m", "m", "<mark>2</mark>").await.unwrap();
    assert!(link.domain_xml(&domain, true).await.unwrap().contains("<metadata><mark>2</mark></metadata>"));
    link.undefine_domain(&domain).await.unwrap();
    assert_eq!(host.domain_names(), ["vm"], "a running domain becomes transient");
    link.destroy_domain(&domain).await.unwrap();
    assert_eq!(code_of(link.domain_state(&domain).await), Some(code::NO_DOMAIN));
}

#[tokio::test]
async fn a_frozen_host_answers_nothing_until_the_link_is_closed() {
    let host = MemoryHost::new("hv1");
    let link = host.link();
    host.freeze_at(1);
    link.lib_version().await.unwrap();
    let waiting = tokio::spawn({
        let link = link.clone();
        async move { link.hostname().await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    link.close();
    assert!(matches!(waiting.await.unwrap().unwrap_err().kind, CallFailure::LinkDead { .. }));
    assert_eq!(host.calls(), ["lib_version"]);
}

#[tokio::test]
async fn the_control_link_is_shared_until_it_is_dead() {
    let host = MemoryHost::new("hv1");
    let connect = MemoryConnect::single("lab", &host);
    let id = HostId { entry: "lab".to_owned(), host: "hv1".to_owned() };
    let first = connect.control(&id).await.unwrap();
    connect.control(&id).await.unwrap();
    assert_eq!(connect.dials(), 1);
    first.close();
    assert!(connect.control(&id).await.unwrap().is_alive());
    connect.dedicated(&id).await.unwrap();
    assert_eq!(connect.dials(), 3);
}
