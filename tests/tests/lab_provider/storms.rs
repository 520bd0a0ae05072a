//! Many calls for few names, and listings while VMs come and go.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egress_provider_proto::v1::{ErrorClass, ErrorReason as Reason, ListByTagRequest};
use lab_tests::case::uid_of;
use lab_tests::{Case, Clients, Refusal};
use tonic::Status;

const HOST: &str = "hv2";

fn transient(status: &Status) -> Reason {
    let refusal = Refusal::of(status);
    assert_eq!(refusal.reason.class(), ErrorClass::Transient, "{}: {}", refusal.reason.wire_name(), refusal.message);
    assert!(!matches!(refusal.reason, Reason::Internal | Reason::LibvirtError | Reason::LinkLost), "{refusal:?}");
    refusal.reason
}

#[tokio::test(flavor = "multi_thread")]
async fn storms_of_create_and_delete_of_the_same_names_end_where_the_last_call_says() {
    let Some(case) = Case::start("storm", &[HOST]) else { return };
    let daemons = [case.daemon_in("a", case.entry()).await, case.daemon_in("b", case.entry()).await];
    let vms: Vec<_> = ["a", "b", "c"].map(|n| case.vm(n)).into();
    // with the base there all calls meet at the volumes
    daemons[0].clients().create(case.request(&case.vm("warm"), HOST)).await.expect("created");
    let mut callers = Vec::new();
    for caller in 0..4_usize {
        for (n, vm) in vms.iter().enumerate() {
            let clients: Clients = daemons[caller % 2].clients();
            let (vm, request) = (vm.clone(), case.request(vm, HOST));
            callers.push(tokio::spawn(async move {
                let mut refusals = BTreeMap::<&str, u32>::new();
                for round in 0..4 {
                    let outcome = if (caller + n + round).is_multiple_of(2) {
                        clients.create(request.clone()).await.map(drop)
                    } else {
                        clients.delete_by_key(&vm, &uid_of(&vm)).await.map(drop)
                    };
                    if let Err(status) = outcome {
                        *refusals.entry(transient(&status).wire_name()).or_default() += 1;
                    }
                }
                refusals
            }));
        }
    }
    for caller in callers {
        caller.await.unwrap_or_else(|e| panic!("a caller: {e}"));
    }
    let clients = daemons[0].clients();
    for vm in &vms {
        clients.delete_by_key(vm, &uid_of(vm)).await.expect("the last word");
        clients.create(case.request(vm, HOST)).await.expect("and the one after it");
        clients.delete_by_key(vm, &uid_of(vm)).await.expect("deleted");
    }
    clients.delete_by_key(&case.vm("warm"), &uid_of(&case.vm("warm"))).await.expect("deleted");
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_while_vms_come_and_go_has_every_steady_one_once() {
    const LISTINGS: usize = 12;
    let Some(case) = Case::start("churn", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let steady: Vec<_> = ["b", "d", "f", "h"].map(|n| case.vm(n)).into();
    for vm in &steady {
        clients.create(case.request(vm, HOST)).await.expect("created");
    }
    let stop = Arc::new(AtomicBool::new(false));
    // before, between and behind the steady ones in the order of the listing
    let coming: Vec<_> = ["a", "e", "i"].map(|n| case.vm(n)).into();
    let churn: Vec<_> = coming
        .iter()
        .map(|vm| {
            let (clients, stop, vm, request) = (clients.clone(), stop.clone(), vm.clone(), case.request(vm, HOST));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    clients.create(request.clone()).await.expect("created");
                    clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("deleted");
                }
            })
        })
        .collect();
    for size in (1..=3).cycle().take(LISTINGS) {
        let mut names = Vec::new();
        let mut page_token = String::new();
        loop {
            let page = ListByTagRequest { page_size: size, page_token, require_complete: true, ..Default::default() };
            let page = clients.provider.clone().list_by_tag(page).await.expect("a page").into_inner();
            assert!(page.complete, "{page:?}");
            names.extend(page.instances.into_iter().map(|i| i.name));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        let distinct: HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "one is listed twice: {names:?}");
        assert!(steady.iter().all(|vm| distinct.contains(vm)), "a steady one is missing: {names:?}");
    }
    stop.store(true, Ordering::Relaxed);
    for task in churn {
        task.await.expect("Creates and Deletes beside the listings");
    }
}
