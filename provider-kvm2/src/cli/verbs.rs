//! The verbs that ask once and show the answer.

use std::time::Duration;

use clap::Args;
use egress_provider_proto::v1;

use super::client::{CALL, Client, MARGIN, within};
use super::create::BY_HAND;
use super::{ClientArgs, Exit, Failure, Output, output};

/// Which instance is meant.
#[derive(Debug, Args)]
pub struct Selection {
    /// Name, or the id that create and list show.
    #[arg(value_name = "NAME|ID")]
    pub which: String,
    /// The uid that it has to have.
    #[arg(long)]
    pub uid: Option<String>,
    /// The installation that it has to belong to.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub installation_id: String,
    /// Host to look on; all hosts if left out.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub zone: String,
}

#[derive(Debug, Args)]
pub struct GetArgs {
    #[command(flatten)]
    pub selection: Selection,
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// By NAME, the instance has to have the uid of --uid, or `cli` as create gives it.
    #[command(flatten)]
    pub selection: Selection,
    /// Give up an instance on a host that is not configured any more; it may go on running there.
    #[arg(long)]
    pub abandon_unknown_host: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only instances of this installation.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub installation_id: String,
    /// Fail if a host cannot be listed.
    #[arg(long)]
    pub require_complete: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Time for all hosts together.
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub timeout: Duration,
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub client: ClientArgs,
}

#[derive(Debug, Args)]
pub struct ImagesArgs {
    /// Only this host.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub zone: String,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// `90s`, `10m`, `1h 30m`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let parsed: jiff::SignedDuration = text.parse().map_err(|e: jiff::Error| e.to_string())?;
    Duration::try_from(parsed).map_err(|_| "a duration is not negative".to_owned())
}

impl Selection {
    fn by_id(&self) -> Option<v1::InstanceById> {
        // no name has a slash and every id has
        self.which.contains('/').then(|| v1::InstanceById {
            instance_id: self.which.clone(),
            uid: self.uid.clone().unwrap_or_default(),
            installation_id: self.installation_id.clone(),
        })
    }

    fn by_key(&self, uid: &str) -> v1::InstanceKey {
        v1::InstanceKey {
            name: self.which.clone(),
            uid: uid.to_owned(),
            installation_id: self.installation_id.clone(),
            zone: self.zone.clone(),
        }
    }
}

pub(super) async fn get(args: GetArgs) -> Result<(), Failure> {
    use v1::get_request::Selector;
    let mut client = Client::connect(&args.client).await?;
    let selector = match (args.selection.by_id(), &args.selection.uid) {
        (Some(id), _) => Selector::Id(id),
        (None, Some(uid)) => Selector::Key(args.selection.by_key(uid)),
        (None, None) => Selector::Id(find(&mut client, &args.selection).await?),
    };
    let request = v1::GetRequest { entry: client.entry.clone(), selector: Some(selector) };
    let response = client.provider.get(within(request, CALL)).await?.into_inner();
    match client.output {
        Output::Json => output::line(output::json("GetResponse", &response)?),
        Output::Table => output::line(response.instance.as_ref().map(output::instance).unwrap_or_default()),
    }
    Ok(())
}

/// A person who looks knows a name and no uid.
async fn find(client: &mut Client, selection: &Selection) -> Result<v1::InstanceById, Failure> {
    let listed = list_all(client, &selection.installation_id, false).await?;
    let mut ids: Vec<_> = listed
        .instances
        .iter()
        .filter(|i| i.name == selection.which && (selection.zone.is_empty() || i.host == selection.zone))
        .map(|i| i.instance_id.clone())
        .collect();
    let missing: Vec<_> = listed.unreachable_hosts.iter().map(|h| h.host.as_str()).collect();
    match (ids.pop(), ids.is_empty()) {
        (Some(instance_id), true) => Ok(v1::InstanceById { instance_id, ..Default::default() }),
        (Some(other), false) => Err(Failure::new(Exit::Usage, format!("more than one instance has the name {}", selection.which))
            .fact("ids", format!("{} {other}", ids.join(" ")))
            .fact("what to do", "name one of the ids, or the host with --zone")),
        (None, _) if !missing.is_empty() => {
            Err(Failure::new(Exit::Transient, format!("no instance {} on the hosts that answered", selection.which))
                .fact("not asked", missing.join(" "))
                .fact("what to do", "repeat the command when these hosts answer"))
        }
        (None, _) => Err(Failure::new(Exit::NotFound, format!("no instance has the name {}", selection.which))),
    }
}

pub(super) async fn delete(args: DeleteArgs) -> Result<(), Failure> {
    use v1::delete_request::Selector;
    use v1::delete_response::Outcome;
    let mut client = Client::connect(&args.client).await?;
    let by_hand = args.selection.uid.is_none();
    let selector = match args.selection.by_id() {
        Some(id) => Selector::Id(id),
        None => Selector::Key(args.selection.by_key(args.selection.uid.as_deref().unwrap_or(BY_HAND))),
    };
    let by_name = matches!(selector, Selector::Key(_));
    let request =
        v1::DeleteRequest { entry: client.entry.clone(), selector: Some(selector), abandon_unknown_host: args.abandon_unknown_host };
    let response = client.provider.delete(within(request, CALL * 3)).await.map_err(|status| {
        let failure = Failure::from(status);
        if by_hand && by_name {
            failure.fact("hint", "an instance that create did not make is deleted by its id, or with its --uid")
        } else {
            failure
        }
    })?;
    let response = response.into_inner();
    match client.output {
        Output::Json => output::line(output::json("DeleteResponse", &response)?),
        Output::Table => {
            let word = match response.outcome() {
                Outcome::Deleted => "deleted",
                Outcome::AlreadyAbsent => "already absent",
                Outcome::Abandoned => "abandoned: its host is not configured, it may still run there",
                Outcome::Unspecified => "done",
            };
            output::line(format_args!("{}: {word}", args.selection.which));
            for removed in &response.removed {
                output::line(format_args!("  removed {} on {}", removed.name, removed.host));
            }
        }
    }
    Ok(())
}

/// All pages as one answer.
async fn list_all(client: &mut Client, installation_id: &str, require_complete: bool) -> Result<v1::ListByTagResponse, Failure> {
    let mut all = v1::ListByTagResponse { complete: true, ..Default::default() };
    let mut page_token = String::new();
    loop {
        let request = v1::ListByTagRequest {
            entry: client.entry.clone(),
            installation_id: installation_id.to_owned(),
            page_size: 0,
            page_token,
            require_complete,
        };
        let page = client.provider.list_by_tag(within(request, CALL)).await?.into_inner();
        all.complete &= page.complete;
        all.instances.extend(page.instances);
        all.orphan_volumes.extend(page.orphan_volumes);
        // both are told over all pages, so the last page's are all there are
        (all.unreachable_hosts, all.unreadable_instances) = (page.unreachable_hosts, page.unreadable_instances);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(all);
        }
    }
}

pub(super) async fn list(args: ListArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.client).await?;
    let listed = list_all(&mut client, &args.installation_id, args.require_complete).await?;
    if client.output == Output::Json {
        output::line(output::json("ListByTagResponse", &listed)?);
        return Ok(());
    }
    let rows = listed.instances.iter().map(|i| {
        [
            i.name.clone(),
            i.host.clone(),
            output::phase(i),
            output::or_dash(&i.uid),
            output::time(i.created_at.as_ref()),
            i.instance_id.clone(),
        ]
    });
    output::line(output::table(["NAME", "HOST", "PHASE", "UID", "CREATED", "ID"], rows));
    if !listed.orphan_volumes.is_empty() {
        let rows = listed.orphan_volumes.iter().map(|v| {
            let remove = if v.instance_id.is_empty() { "-".into() } else { format!("delete {}", v.instance_id) };
            [v.name.clone(), v.host.clone(), v.pool.clone(), output::orphan_kind(v).to_owned(), output::bytes(v.allocation_bytes), remove]
        });
        output::line(format_args!(
            "\nVolumes without an instance:\n{}",
            output::table(["VOLUME", "HOST", "POOL", "KIND", "SIZE", "TO REMOVE"], rows)
        ));
    }
    for host in &listed.unreachable_hosts {
        let error = host.error.clone().unwrap_or_default();
        eprintln!("warning: host {} is not listed: {}: {}", host.host, error.reason, error.message);
    }
    for instance in &listed.unreadable_instances {
        let error = instance.error.clone().unwrap_or_default();
        eprintln!("warning: {} on {} carries our mark and cannot be read: {}", instance.name, instance.host, error.message);
    }
    Ok(())
}

pub(super) async fn check(args: CheckArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.client).await?;
    let request = v1::CheckRequest { entry: client.entry.clone(), timeout: args.timeout.try_into().ok() };
    let response = client.provider.check(within(request, args.timeout.saturating_add(MARGIN))).await?.into_inner();
    match client.output {
        Output::Json => output::line(output::json("CheckResponse", &response)?),
        Output::Table => print_checks(&response),
    }
    let broken: Vec<_> = response.hosts.iter().filter(|h| !h.healthy).collect();
    let Some(first) = broken.first() else { return Ok(()) };
    // the class of the first one tells a script whether asking again may help
    let class = v1::ErrorReason::from_wire_name(&first.error_reason).map_or(v1::ErrorClass::Transient, v1::ErrorReason::class);
    let names: Vec<_> = broken.iter().map(|h| h.host.as_str()).collect();
    Err(Failure::new(
        class.into(),
        format!("{} of {} hosts cannot run instances: {}", broken.len(), response.hosts.len(), names.join(", ")),
    ))
}

fn print_checks(response: &v1::CheckResponse) {
    let rows = response.hosts.iter().map(|h| {
        let latency = h.latency.and_then(|d| Duration::try_from(d).ok()).map(|d| format!("{} ms", d.as_millis())).unwrap_or_default();
        let details = h.details.clone().unwrap_or_default();
        let free = match details.pool_available_bytes {
            Some(free) => format!("{} of {}", output::bytes(free), output::bytes(details.pool_capacity_bytes)),
            None => "-".into(),
        };
        [h.host.clone(), h.address.clone(), output::check_reason(h), latency, output::or_dash(&details.libvirt_version), free]
    });
    output::line(output::table(["HOST", "ADDRESS", "RESULT", "LATENCY", "LIBVIRT", "POOL FREE"], rows));
    for host in &response.hosts {
        if !host.healthy {
            output::line(format_args!("\n{}: {}", host.host, host.message));
            if !host.remediation.is_empty() {
                output::line(format_args!("  what to do: {}", host.remediation));
            }
        }
        for warning in host.details.iter().flat_map(|d| &d.warnings) {
            output::line(format_args!("{}: warning: {warning}", host.host));
        }
    }
}

pub(super) async fn info(args: InfoArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.client).await?;
    let request = v1::GetProviderInfoRequest { entry: client.entry.clone() };
    let info = client.provider.get_provider_info(within(request, CALL)).await?.into_inner();
    if client.output == Output::Json {
        output::line(output::json("GetProviderInfoResponse", &info)?);
        return Ok(());
    }
    output::line(format_args!("{} {} ({})", info.provider_type, info.provider_version, info.contract_version));
    for entry in &info.entries {
        output::line(format_args!("\nentry {}, disk {}", entry.name, output::bytes(entry.disk_bytes)));
        let hosts = entry.hosts.iter().map(|h| [h.name.clone(), h.address.clone()]);
        output::line(output::table(["HOST", "ADDRESS"], hosts));
        let types = entry.machine_types.iter().map(|m| [m.key.clone(), m.vcpus.to_string(), format!("{} MiB", m.memory_mib)]);
        output::line(output::table(["MACHINE TYPE", "CPUS", "MEMORY"], types));
        if !entry.images.is_empty() {
            let images = entry.images.iter().map(|i| {
                let digest = if i.sha256.is_empty() { "any".into() } else { i.sha256.chars().take(12).collect() };
                [i.key.clone(), digest, i.redacted_url.clone()]
            });
            output::line(output::table(["IMAGE", "SHA256", "URL"], images));
        }
    }
    Ok(())
}

pub(super) async fn images(args: ImagesArgs) -> Result<(), Failure> {
    let mut client = Client::connect(&args.client).await?;
    let mut all = v1::ListImagesResponse { complete: true, ..Default::default() };
    let mut page_token = String::new();
    loop {
        let request = v1::ListImagesRequest { entry: client.entry.clone(), zone: args.zone.clone(), page_token, ..Default::default() };
        let page = client.images.list_images(within(request, CALL)).await?.into_inner();
        all.complete &= page.complete;
        all.images.extend(page.images);
        all.unreachable_hosts = page.unreachable_hosts;
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    if client.output == Output::Json {
        output::line(output::json("ListImagesResponse", &all)?);
        return Ok(());
    }
    let rows = all.images.iter().map(|i| {
        let name = if i.key.is_empty() { &i.redacted_url } else { &i.key };
        [output::or_dash(name), i.host.clone(), output::image_state(i), output::bytes(i.bytes_done), output::or_dash(&i.volume)]
    });
    output::line(output::table(["IMAGE", "HOST", "STATE", "SIZE", "VOLUME"], rows));
    for host in &all.unreachable_hosts {
        let error = host.error.clone().unwrap_or_default();
        eprintln!("warning: host {} is not listed: {}: {}", host.host, error.reason, error.message);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_people_write_them() {
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(duration("1h 30m"), Ok(Duration::from_secs(5400)));
        assert!(duration("-5s").is_err() && duration("soon").is_err());
    }
}
