//! `create`: once, or until the instance has an address.

use std::io::Read as _;
use std::time::Duration;

use clap::Args;
use egress_provider_proto::v1::{self, ErrorReason, InstanceState};
use sha2::{Digest as _, Sha256};
use tonic::Status;
use tonic_types::StatusExt as _;

use super::client::{CALL, Client, MARGIN, within};
use super::progress::Progress;
use super::{ClientArgs, Exit, Failure, Output, output};
use crate::service::MAX_USER_DATA;

/// The uid of what a person makes by hand; `delete` expects the same, so that it never removes an
/// instance of the operator by its mere name.
pub(super) const BY_HAND: &str = "cli";

/// How long one Create of a --wait may take before it is repeated.
const ONE_CREATE: Duration = Duration::from_secs(20);
/// Between two questions while waiting.
const POLL: Duration = Duration::from_secs(1);
/// Before a Create is repeated whose answer names no delay.
const REPEAT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the instance: lower-case letters, digits, '-' and '.'.
    pub name: String,
    /// Tells instances apart that have had the same name.
    #[arg(long, default_value = BY_HAND)]
    pub uid: String,
    /// Whose instance it is, for example the id of a cluster.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub installation_id: String,
    /// Key of the image catalogue, or an http(s) URL.
    #[arg(long)]
    pub image: String,
    /// Key of the machine type catalogue.
    #[arg(long)]
    pub machine_type: String,
    /// Host to make it on; may be left out where only one is configured.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub zone: String,
    /// Not used for placing.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub region: String,
    /// File with the cloud-init user-data, - for stdin.
    #[arg(long, value_name = "FILE|-")]
    pub user_data: Option<String>,
    /// Wait until it runs and has an address, showing progress; repeats what is worth repeating.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "10m", value_parser = super::verbs::duration)]
    pub wait: Option<Duration>,
    #[command(flatten)]
    pub client: ClientArgs,
}

pub(super) async fn run(args: CreateArgs) -> Result<(), Failure> {
    let request = request(&args)?;
    let mut client = Client::connect(&args.client).await?;
    let response = match args.wait {
        None => once(&mut client, request).await?,
        Some(wait) => {
            let mut progress = Progress::start();
            let mut last = String::new();
            let waiting = until_running(&mut client, request, &mut progress, &mut last);
            let ended = tokio::time::timeout(wait, waiting).await;
            drop(progress);
            ended.map_err(|_| {
                Failure::new(Exit::Transient, format!("{} is not running after {wait:?}", args.name))
                    .fact("last seen", last)
                    .fact("what to do", "repeat the command to wait on, or delete the instance")
            })??
        }
    };
    match client.output {
        Output::Json => output::line(output::json("CreateResponse", &response)?),
        Output::Table => output::line(response.instance.as_ref().map(output::instance).unwrap_or_default()),
    }
    Ok(())
}

fn request(args: &CreateArgs) -> Result<v1::CreateRequest, Failure> {
    let user_data = match args.user_data.as_deref() {
        None => Vec::new(),
        Some(file) => read_user_data(file)?,
    };
    let mut digest = Sha256::new();
    for part in [args.region.as_bytes(), args.machine_type.as_bytes(), args.image.as_bytes(), &user_data] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    Ok(v1::CreateRequest {
        entry: args.client.entry.clone(),
        name: args.name.clone(),
        uid: args.uid.clone(),
        installation_id: args.installation_id.clone(),
        placement: Some(v1::Placement {
            zone: args.zone.clone(),
            region: args.region.clone(),
            machine_type: args.machine_type.clone(),
            image: args.image.clone(),
        }),
        cloud_init: Some(v1::CloudInit { user_data }),
        // so that the same command finds its instance and another one is told of the difference
        spec_hash: format!("cli-{}", hex::encode(digest.finalize())),
        max_wait: None,
        port: 0,
    })
}

fn read_user_data(file: &str) -> Result<Vec<u8>, Failure> {
    let failed = |e: std::io::Error| Failure::new(Exit::Usage, format!("cannot read the user-data from {file}: {e}"));
    let reader: Box<dyn std::io::Read> =
        if file == "-" { Box::new(std::io::stdin()) } else { Box::new(std::fs::File::open(file).map_err(failed)?) };
    let mut data = Vec::new();
    reader.take(MAX_USER_DATA as u64 + 1).read_to_end(&mut data).map_err(failed)?;
    if data.len() > MAX_USER_DATA {
        return Err(Failure::new(Exit::Usage, format!("the user-data is larger than {MAX_USER_DATA} bytes")));
    }
    Ok(data)
}

async fn once(client: &mut Client, request: v1::CreateRequest) -> Result<v1::CreateResponse, Failure> {
    // the provider waits 25 s for a cold image and then says how far it is
    let response = client.provider.create(within(request, CALL)).await?;
    Ok(response.into_inner())
}

/// `last` holds what was seen last, for whoever gives up waiting.
async fn until_running(
    client: &mut Client,
    mut request: v1::CreateRequest,
    progress: &mut Progress,
    last: &mut String,
) -> Result<v1::CreateResponse, Failure> {
    request.max_wait = ONE_CREATE.try_into().ok();
    let mut response = loop {
        match create_watched(client, &request, progress, last).await {
            Ok(response) => break response,
            Err(status) => {
                let delay = repeat_after(&status).ok_or(status)?;
                tokio::time::sleep(delay).await;
            }
        }
    };
    let id = response.instance.as_ref().map(|i| i.instance_id.clone()).unwrap_or_default();
    loop {
        if let Some(instance) = &response.instance {
            let state = output::state(instance);
            progress.show("waiting for an address", &state);
            last.clone_from(&state);
            match instance.state() {
                InstanceState::Running => return Ok(response),
                InstanceState::Paused | InstanceState::Stopped | InstanceState::Deleting => {
                    return Err(Failure::new(Exit::Other, format!("{} is {state} and will not run by itself", instance.name))
                        .fact("id", &instance.instance_id)
                        .fact("detail", &instance.state_message)
                        .fact("what to do", "see the host, or delete the instance and create it again"));
                }
                InstanceState::Provisioning | InstanceState::Unknown | InstanceState::Unspecified => {}
            }
        }
        tokio::time::sleep(POLL).await;
        let selector =
            v1::get_request::Selector::Id(v1::InstanceById { instance_id: id.clone(), uid: request.uid.clone(), ..Default::default() });
        match client.provider.get(within(v1::GetRequest { entry: request.entry.clone(), selector: Some(selector) }, CALL)).await {
            Ok(got) => response.instance = got.into_inner().instance,
            // an address that cannot be read at this moment, a link that is redialled
            Err(status) if class_is_transient(&status) => *last = status.message().to_owned(),
            Err(status) => return Err(status.into()),
        }
    }
}

/// One Create, with the progress of its image beside it.
async fn create_watched(
    client: &mut Client,
    request: &v1::CreateRequest,
    progress: &mut Progress,
    last: &mut String,
) -> Result<v1::CreateResponse, Status> {
    progress.show("creating", "");
    let Client { provider, images, .. } = client;
    let creating = provider.create(within(request.clone(), ONE_CREATE + MARGIN));
    let watching = async {
        let placement = request.placement.clone().unwrap_or_default();
        let wanted = v1::GetImageRequest { entry: request.entry.clone(), zone: placement.zone, image: placement.image };
        loop {
            tokio::time::sleep(POLL).await;
            // whatever fails here is told by the Create itself
            let Ok(answer) = images.get_image(within(wanted.clone(), CALL)).await else { continue };
            if let Some(image) = answer.into_inner().image.filter(|i| i.state() == v1::ImageState::Pulling) {
                let detail = output::progress(image.bytes_done, image.bytes_total);
                progress.show("pulling the image", &detail);
                *last = format!("pulling the image: {detail}");
            }
        }
    };
    tokio::select! {
        answer = creating => answer.map(tonic::Response::into_inner),
        () = watching => Err(Status::internal("the watch of an image has no end")),
    }
}

fn reason_of(status: &Status) -> Option<ErrorReason> {
    status.get_error_details().error_info().and_then(|i| ErrorReason::from_wire_name(&i.reason))
}

fn class_is_transient(status: &Status) -> bool {
    reason_of(status).map_or_else(|| v1::ErrorClass::of_code(status.code()), ErrorReason::class) == v1::ErrorClass::Transient
}

/// When a Create is worth repeating while a person waits: its work goes on, or something else on the
/// same name has to end first. A host that is down is told at once.
fn repeat_after(status: &Status) -> Option<Duration> {
    let worth = matches!(
        reason_of(status)?,
        ErrorReason::ImagePullInProgress | ErrorReason::CallTimeout | ErrorReason::OperationInProgress | ErrorReason::StateChanged
    );
    let told = status.get_error_details().retry_info().and_then(|r| r.retry_delay);
    worth.then(|| told.unwrap_or(REPEAT).min(Duration::from_secs(30)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ProviderError, Reason};
    use crate::service::Fault;

    fn status(reason: Reason) -> Status {
        Fault::from(ProviderError::new(reason, "x").retry_after(Duration::from_secs(3))).into_status("create", "")
    }

    #[test]
    fn a_pull_is_waited_for_and_a_dead_host_is_not() {
        assert_eq!(repeat_after(&status(Reason::ImagePullInProgress)), Some(Duration::from_secs(3)));
        for reason in [Reason::HostUnreachable, Reason::SpecConflict, Reason::PoolSpace] {
            assert_eq!(repeat_after(&status(reason)), None, "{reason:?}");
        }
        assert_eq!(repeat_after(&Status::unavailable("no reason")), None);
    }
}
