//! A caller: makes the calls of its plan and compares each answer with what it may believe.

use std::sync::Arc;

use egress_provider_proto::v1::{
    CheckRequest, CreateRequest, DeleteRequest, ErrorClass, ErrorReason as Reason, GetRequest, Instance, InstanceById, InstanceKey,
    ListByTagRequest, create_response, delete_request, delete_response, get_request,
};

use crate::clients::Clients;
use crate::lab::Host;

use super::answer::{Answer, ask};
use super::belief::{Belief, Made, Seen, There, Work};
use super::breaker::on_host;
use super::course::{Course, host_of, uid};
use super::plan::{Call, DAEMONS, HOSTS, Hand, NAMES, Patience, Selector, Uid, Vm};
use super::reasons::Failed;
use super::report::{Excerpt, Finding, Suspect, length};

#[derive(Debug)]
pub struct Caller {
    course: Arc<Course>,
    n: usize,
    beliefs: Vec<Belief>,
    clients: Vec<Clients>,
    /// How often each daemon had ended when the beliefs were told last.
    endings: [u64; DAEMONS],
    /// The step under way.
    step: u64,
    /// Where the daemons' logs were when it began.
    logs: [u64; DAEMONS],
}

type Created = Answer<egress_provider_proto::v1::CreateResponse>;
type Deleted = Answer<egress_provider_proto::v1::DeleteResponse>;

impl Caller {
    pub fn new(course: Arc<Course>, n: usize) -> Self {
        let clients = course.sockets.iter().map(|socket| Clients::on(socket)).collect();
        Self { course, n, beliefs: vec![Belief::default(); NAMES], clients, endings: [0; DAEMONS], step: 0, logs: [0; DAEMONS] }
    }

    pub fn beliefs(&self) -> &[Belief] {
        &self.beliefs
    }

    /// Makes one call; what the journal says of it.
    pub async fn call(&mut self, step: u64, call: &Call) -> String {
        self.step = step;
        self.logs = std::array::from_fn(|d| length(&self.course.logs[d]));
        self.catch_up();
        match call {
            Call::Create { name, vm, image, daemon, patience } => self.create(*name, *vm, image, *daemon, *patience).await,
            Call::CreateTwice { name, vm, image, daemons } => self.create_twice(*name, *vm, image, *daemons).await,
            Call::DeleteDuringCreate { name, vm, image, after_ms, daemons } => {
                self.delete_during_create(*name, *vm, image, *after_ms, *daemons).await
            }
            Call::Delete { name, uid, by, daemon, patience } => self.delete(*name, *uid, *by, *daemon, *patience).await,
            Call::Get { name, uid, by, daemon } => self.get(*name, *uid, *by, *daemon).await,
            Call::List { complete, daemon } => self.list(*complete, *daemon).await,
            Call::Check { daemon } => self.check(*daemon).await,
            Call::ByHand { name, hand } => self.by_hand(*name, *hand).await,
            Call::Foreign { host, daemon } => self.foreign(*host, *daemon).await,
        }
    }

    /// Daemons end and requests run dry while a caller does nothing.
    fn catch_up(&mut self) {
        let now = self.course.weather.now();
        for daemon in 0..DAEMONS {
            let ended = self.course.ended(daemon);
            if ended != self.endings[daemon] {
                self.endings[daemon] = ended;
                self.beliefs.iter_mut().for_each(|belief| belief.daemon_ended(daemon, now));
            }
        }
        for name in 0..NAMES {
            let whole = self.course.weather.whole_since(host_of(self.n, name));
            self.beliefs[name].settle(now, whole);
        }
    }

    fn vm_name(&self, name: usize) -> String {
        self.course.vm_name(self.n, name)
    }

    fn finding(&self, what: String, about: &str) -> Finding {
        let excerpt = |d: usize| Excerpt::since(&self.course.logs[d], self.logs[d], vec![about.to_owned()]);
        Finding { step: Some(self.step), what, excerpts: (0..DAEMONS).map(excerpt).collect() }
    }

    fn violation(&self, name: usize, what: impl std::fmt::Display) {
        let vm = self.vm_name(name);
        let finding = self.finding(format!("{vm}: {what}"), &vm);
        self.course.report().violations.push(finding);
    }

    /// Counts an answer, and keeps a failure to be judged at the end.
    #[expect(clippy::too_many_arguments, reason = "a call, its answer and its surroundings; a struct would only rename them")]
    fn note<T>(&self, kind: &str, label: &str, answer: &Answer<T>, from: u64, at: (&[usize], usize), patience: Patience, about: &str) {
        let until = self.course.weather.now();
        self.course.report().count(kind, label);
        if matches!(answer, Answer::Stuck) {
            let finding = self.finding(format!("{kind} of {about} is not over"), about);
            self.course.report().stuck.push(finding);
        }
        let Some((failure, message)) = answer.failure() else { return };
        let finding = self.finding(format!("{kind} of {about}: {label}: {message}"), about);
        let crossed = (0..NAMES).any(|name| self.vm_name(name) == about && self.beliefs[name].may_be_being_deleted());
        let failed = Failed { failure, hosts: at.0.to_vec(), daemon: at.1, patience, crossed };
        self.course.report().suspects.push(Suspect { finding, failed, from, until });
    }

    fn begin(&mut self, name: usize, work: Work, daemon: usize) {
        self.catch_up();
        let now = self.course.weather.now();
        self.beliefs[name].begin(work, daemon, now);
    }

    // --- Create ---

    async fn ask_create(&self, name: usize, vm: Vm, image: &str, daemon: usize, patience: Patience) -> Created {
        let (vm_name, host) = (self.vm_name(name), host_of(self.n, name));
        let mut request: CreateRequest = self.course.request(&vm_name, host, vm, image);
        if patience == Patience::NotAtAll {
            request.max_wait = Some(prost_types::Duration::default());
        }
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let answer = ask(patience, request, |request| async move { client.create(request).await }).await;
        let label = answer.label(|created| created.outcome().as_str_name().replace("OUTCOME_", ""));
        if !is_of_history(&answer) {
            self.note("Create", &label, &answer, from, (&[host], daemon), patience, &vm_name);
        } else {
            self.course.report().count("Create", &label);
        }
        answer
    }

    async fn create(&mut self, name: usize, vm: Vm, image: &str, daemon: usize, patience: Patience) -> String {
        self.catch_up();
        let before = self.beliefs[name].clone();
        self.begin(name, Work::Create(vm), daemon);
        let answer = self.ask_create(name, vm, image, daemon, patience).await;
        self.created(name, vm, daemon, &before, &answer, true);
        short(&answer)
    }

    /// `before` is what may have been there with all that went on beside this call; `alone`: nothing else did on this name.
    fn created(&mut self, name: usize, vm: Vm, daemon: usize, before: &Belief, answer: &Created, alone: bool) {
        let now = self.course.weather.now();
        let work = Work::Create(vm);
        match answer {
            Answer::Given(created) => {
                let instance = created.instance.clone().unwrap_or_default();
                self.is_asked_for(name, vm.uid, &instance);
                let made = match created.outcome() {
                    create_response::Outcome::Created => Made::Created,
                    create_response::Outcome::Joined => Made::Joined,
                    create_response::Outcome::Existing => Made::Existing,
                    create_response::Outcome::Unspecified => return self.violation(name, "an answer without an outcome"),
                };
                if let Err(why) = before.may_make(vm, made) {
                    self.violation(name, why);
                }
                // one that was made anew is another than the one that was suspended
                if before.suspended && before.is_certain() && made != Made::Created {
                    self.violation(name, "a suspended VM was created");
                }
                let belief = &mut self.beliefs[name];
                belief.over(work, daemon, now, false);
                (belief.suspended, belief.perhaps_suspended) = (false, false);
                if alone {
                    belief.daemon_is_through(daemon);
                    belief.is(There::Complete(vm));
                }
            }
            Answer::Refused { reason, .. } => {
                let seen = match reason {
                    Reason::NameOwnedByOtherUid => Some(Seen::NotOf(vm.uid)),
                    Reason::SpecConflict => Some(Seen::OtherSpec(vm)),
                    Reason::VolumeConflict => Some(Seen::Volumes),
                    Reason::PausedByAdmin if before.suspended || before.perhaps_suspended || !before.is_certain() => Some(Seen::Domain),
                    _ => None,
                };
                if seen.is_none() && is_of_history(answer) {
                    self.violation(name, short(answer));
                }
                if let Some(seen) = seen {
                    self.saw(name, seen);
                }
                // these say that the work goes on
                if !matches!(reason, Reason::ImagePullInProgress | Reason::CallTimeout) {
                    self.beliefs[name].over(work, daemon, now, reason.class() == ErrorClass::Transient);
                }
            }
            Answer::None(_) | Answer::Unreadable(_) | Answer::Stuck => {}
        }
    }

    async fn create_twice(&mut self, name: usize, vm: Vm, image: &str, daemons: [usize; 2]) -> String {
        self.catch_up();
        let mut before = self.beliefs[name].clone();
        let certain = before.is_certain();
        for daemon in daemons {
            self.begin(name, Work::Create(vm), daemon);
        }
        before.begin(Work::Create(vm), daemons[1], self.course.weather.now());
        let (first, second) = tokio::join!(
            self.ask_create(name, vm, image, daemons[0], Patience::UntilDone),
            self.ask_create(name, vm, image, daemons[1], Patience::UntilDone)
        );
        let is_created = |a: &Created| matches!(a, Answer::Given(c) if c.outcome() == create_response::Outcome::Created);
        if certain && is_created(&first) && is_created(&second) {
            self.violation(name, "two Creates at once say that each made it");
        }
        // what was refused first: a success says what is there in the end
        let mut answers = [(daemons[0], &first), (daemons[1], &second)];
        answers.sort_by_key(|(_, answer)| matches!(answer, Answer::Given(_)));
        for (daemon, answer) in answers {
            self.created(name, vm, daemon, &before, answer, true);
        }
        format!("{} and {}", short(&first), short(&second))
    }

    async fn delete_during_create(&mut self, name: usize, vm: Vm, image: &str, after_ms: u64, daemons: [usize; 2]) -> String {
        self.catch_up();
        let before = self.beliefs[name].clone();
        let now = self.course.weather.now();
        let (mut for_create, mut for_delete) = (before.clone(), before);
        for_create.begin(Work::Delete(vm.uid), daemons[1], now);
        for_delete.begin(Work::Create(vm), daemons[0], now);
        self.begin(name, Work::Create(vm), daemons[0]);
        self.begin(name, Work::Delete(vm.uid), daemons[1]);
        let later = async {
            tokio::time::sleep(std::time::Duration::from_millis(after_ms)).await;
            self.ask_delete(name, vm.uid, Selector::Key, daemons[1], Patience::UntilDone).await
        };
        let (created, deleted) = tokio::join!(self.ask_create(name, vm, image, daemons[0], Patience::UntilDone), later);
        let said = format!("{} and {}", short(&created), short(&deleted));
        self.created(name, vm, daemons[0], &for_create, &created, false);
        self.deleted(name, vm.uid, Selector::Key, daemons[1], &for_delete, &deleted, false);
        if let Answer::Given(deleted) = &deleted
            && deleted.create_cancelled
            && matches!(created, Answer::Refused { reason: Reason::CreateCancelled, .. })
        {
            let belief = &mut self.beliefs[name];
            belief.daemon_is_through(daemons[0]);
            match deleted.outcome() {
                // the Create had made nothing yet, and volumes without a domain are nobody's who asks by key
                delete_response::Outcome::AlreadyAbsent => self.saw(name, Seen::NoDomain),
                _ => belief.is(There::Nothing),
            }
        }
        said
    }

    // --- Delete ---

    async fn ask_delete(&self, name: usize, owner: Uid, by: Selector, daemon: usize, patience: Patience) -> Deleted {
        let vm_name = self.vm_name(name);
        let selector = match by {
            Selector::Id => delete_request::Selector::Id(self.by_id(name, owner)),
            Selector::Key => delete_request::Selector::Key(self.by_key(name, owner)),
        };
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let request = DeleteRequest { selector: Some(selector), ..Default::default() };
        let answer = ask(patience, request, |request| async move { client.delete(request).await }).await;
        let label = answer.label(|deleted| deleted.outcome().as_str_name().replace("OUTCOME_", ""));
        if !is_of_history(&answer) {
            self.note("Delete", &label, &answer, from, (&self.hosts(name, by), daemon), patience, &vm_name);
        } else {
            self.course.report().count("Delete", &label);
        }
        answer
    }

    pub async fn delete(&mut self, name: usize, owner: Uid, by: Selector, daemon: usize, patience: Patience) -> String {
        self.catch_up();
        let before = self.beliefs[name].clone();
        self.begin(name, Work::Delete(owner), daemon);
        let answer = self.ask_delete(name, owner, by, daemon, patience).await;
        self.deleted(name, owner, by, daemon, &before, &answer, true);
        short(&answer)
    }

    #[expect(clippy::too_many_arguments, reason = "a call, its answer and its surroundings; a struct would only rename them")]
    fn deleted(&mut self, name: usize, owner: Uid, by: Selector, daemon: usize, before: &Belief, answer: &Deleted, alone: bool) {
        let now = self.course.weather.now();
        let work = Work::Delete(owner);
        match answer {
            Answer::Given(deleted) => {
                let absent = match deleted.outcome() {
                    delete_response::Outcome::Deleted => false,
                    delete_response::Outcome::AlreadyAbsent => true,
                    other => return self.violation(name, format!("a Delete answered {other:?}")),
                };
                let fits = before.may_be().iter().any(|there| match there {
                    There::Nothing => absent,
                    There::Volumes => absent == (by == Selector::Key),
                    There::Partial(vm) | There::Complete(vm) => !absent && vm.uid == owner,
                });
                if !fits {
                    self.violation(name, format!("{:?}, where only {:?} may be", deleted.outcome(), before.may_be()));
                }
                let belief = &mut self.beliefs[name];
                belief.over(work, daemon, now, false);
                if alone {
                    belief.daemon_is_through(daemon);
                    if absent && by == Selector::Key {
                        self.saw(name, Seen::NoDomain);
                    } else {
                        belief.is(There::Nothing);
                    }
                }
            }
            Answer::Refused { reason, .. } => {
                match reason {
                    Reason::UidMismatch => self.saw(name, Seen::NotOf(owner)),
                    Reason::VolumeConflict if by == Selector::Id => self.saw(name, Seen::Volumes),
                    _ if is_of_history(answer) => self.violation(name, short(answer)),
                    _ => {}
                }
                let failed = *reason != Reason::UidMismatch;
                self.beliefs[name].over(work, daemon, now, failed);
            }
            Answer::None(_) | Answer::Unreadable(_) | Answer::Stuck => {}
        }
    }

    // --- reading ---

    async fn get(&mut self, name: usize, owner: Uid, by: Selector, daemon: usize) -> String {
        let vm_name = self.vm_name(name);
        let selector = match by {
            Selector::Id => get_request::Selector::Id(self.by_id(name, owner)),
            Selector::Key => get_request::Selector::Key(self.by_key(name, owner)),
        };
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let request = GetRequest { selector: Some(selector), ..Default::default() };
        let answer = ask(Patience::UntilDone, request, |request| async move { client.get(request).await }).await;
        let label = answer.label(|got| got.instance.clone().unwrap_or_default().state().as_str_name().replace("INSTANCE_STATE_", ""));
        match &answer {
            Answer::Given(got) => {
                self.is_asked_for(name, owner, &got.instance.clone().unwrap_or_default());
                self.saw(name, Seen::Owner(owner));
            }
            Answer::Refused { reason: Reason::InstanceNotFound, .. } => self.saw(name, Seen::NoDomain),
            Answer::Refused { reason: Reason::UidMismatch, .. } => self.saw(name, Seen::NotOf(owner)),
            _ if is_of_history(&answer) => self.violation(name, short(&answer)),
            _ => {}
        }
        if is_of_history(&answer) {
            self.course.report().count("Get", &label);
        } else {
            self.note("Get", &label, &answer, from, (&self.hosts(name, by), daemon), Patience::UntilDone, &vm_name);
        }
        short(&answer)
    }

    async fn list(&mut self, complete: bool, daemon: usize) -> String {
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let request = ListByTagRequest { require_complete: complete, ..Default::default() };
        let answer = ask(Patience::UntilDone, request, |request| async move { client.list_by_tag(request).await }).await;
        let label = answer.label(|list| if list.complete { "complete".to_owned() } else { "with gaps".to_owned() });
        self.note("ListByTag", &label, &answer, from, (&[0, 1], daemon), Patience::UntilDone, "kt-soak");
        let Answer::Given(list) = &answer else { return short(&answer) };
        for name in 0..NAMES {
            let (vm_name, host) = (self.vm_name(name), HOSTS[host_of(self.n, name)]);
            let listed: Vec<_> = list.instances.iter().filter(|i| i.name == vm_name).collect();
            if list.unreachable_hosts.iter().any(|h| h.host == host) {
                continue;
            }
            match listed[..] {
                [] => self.saw(name, Seen::NoDomain),
                [one] if one.host == host && one.uid == uid(&vm_name, Uid::A) => self.saw(name, Seen::Owner(Uid::A)),
                [one] if one.host == host && one.uid == uid(&vm_name, Uid::B) => self.saw(name, Seen::Owner(Uid::B)),
                _ => self.violation(name, format!("listed as {listed:?}")),
            }
        }
        if !list.unreadable_instances.is_empty() {
            self.violation(0, format!("marks that cannot be read: {:?}", list.unreadable_instances));
        }
        if list.instances.iter().any(|i| i.name == self.course.foreign()) {
            self.violation(0, "a foreign domain is listed");
        }
        short(&answer)
    }

    async fn check(&mut self, daemon: usize) -> String {
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let answer = ask(Patience::UntilDone, CheckRequest::default(), |request| async move { client.check(request).await }).await;
        self.note("Check", &answer.label(|_| "OK".to_owned()), &answer, from, (&[], daemon), Patience::UntilDone, "check");
        let Answer::Given(check) = &answer else { return short(&answer) };
        for (host, row) in check.hosts.iter().enumerate() {
            self.course.report().count("Check of a host", row.reason().as_str_name().trim_start_matches("CHECK_REASON_"));
            // a broken host is a row and no error; the row has the same reason that an error would have
            if let Some(reason) = Reason::from_wire_name(&row.error_reason) {
                let answer: Answer<()> = Answer::Refused { reason, message: row.message.clone() };
                self.note("Check of a host", "judged", &answer, from, (&[host], daemon), Patience::UntilDone, &row.host);
            }
        }
        "answered".to_owned()
    }

    // --- others ---

    /// What an administrator does is seen on the host itself.
    async fn by_hand(&mut self, name: usize, hand: Hand) -> String {
        let (vm, host) = (self.vm_name(name), host_of(self.n, name));
        let (done, there) = on_host(&self.course, host, move |host: &Host| {
            let was = host.try_virsh(&["list", "--all", "--name"]);
            let done = match hand {
                Hand::Suspend => host.try_virsh(&["suspend", &vm]),
                Hand::Resume => host.try_virsh(&["resume", &vm]),
                Hand::Destroy => host.try_virsh(&["destroy", &vm]),
                Hand::Undefine => host.try_virsh(&["undefine", &vm]),
                Hand::Vanish => host.try_virsh(&["destroy", &vm]).and(host.try_virsh(&["undefine", &vm])),
            };
            let is = |list: &str| list.split_whitespace().any(|name| name == vm);
            let is_there = host.try_virsh(&["list", "--all", "--name"]).map(|list| is(&list));
            (done.is_ok(), was.ok().zip(is_there.ok()).map(|(was, after)| (is(&was), after)))
        })
        .await;
        self.course.report().count("by hand", &format!("{hand:?} {}", if done { "done" } else { "failed" }));
        let belief = &mut self.beliefs[name];
        // a command that failed may still have done something: libvirtd may have ended in the middle
        match (hand, there) {
            (_, None) => {
                belief.undefined_by_hand();
                belief.may_have_lost_its_domain();
                belief.perhaps_suspended |= hand == Hand::Suspend;
                return "virsh failed".to_owned();
            }
            (Hand::Undefine, Some((true, true))) => belief.undefined_by_hand(),
            (_, Some((true, false))) => belief.may_have_lost_its_domain(),
            _ => {}
        }
        match hand {
            Hand::Suspend if done => belief.suspended = true,
            Hand::Resume | Hand::Destroy if done => (belief.suspended, belief.perhaps_suspended) = (false, false),
            _ => {}
        }
        if let Some((_, is_there)) = there {
            self.saw(name, if is_there { Seen::Domain } else { Seen::NoDomain });
        }
        format!("{hand:?} {}", if done { "done" } else { "failed" })
    }

    async fn foreign(&mut self, host: usize, daemon: usize) -> String {
        let name = self.course.foreign();
        let vm = Vm { uid: Uid::A, spec: super::plan::Spec::One };
        let id = InstanceById { instance_id: format!("hosts/{}/domains/{name}", HOSTS[host]), ..Default::default() };
        let from = self.course.weather.now();
        let mut client = self.clients[daemon].provider.clone();
        let create = self.course.request(&name, host, vm, "tiny");
        let created = ask(Patience::UntilDone, create, |request| async move { client.create(request).await }).await;
        let mut client = self.clients[daemon].provider.clone();
        let get = GetRequest { selector: Some(get_request::Selector::Id(id.clone())), ..Default::default() };
        let got = ask(Patience::UntilDone, get, |request| async move { client.get(request).await }).await;
        let mut client = self.clients[daemon].provider.clone();
        let delete = DeleteRequest { selector: Some(delete_request::Selector::Id(id)), ..Default::default() };
        let deleted = ask(Patience::UntilDone, delete, |request| async move { client.delete(request).await }).await;
        let at = (&[host][..], daemon);
        self.refuses_foreign("Create", &created, Reason::NameNotManaged, from, at, &name);
        self.refuses_foreign("Get", &got, Reason::NotManaged, from, at, &name);
        self.refuses_foreign("Delete", &deleted, Reason::NotManaged, from, at, &name);
        format!("{} and {} and {}", short(&created), short(&got), short(&deleted))
    }

    fn refuses_foreign<T: std::fmt::Debug>(
        &self,
        call: &str,
        answer: &Answer<T>,
        with: Reason,
        from: u64,
        at: (&[usize], usize),
        name: &str,
    ) {
        let kind = format!("{call} of foreign");
        match answer {
            Answer::Refused { reason, .. } if *reason == with => self.course.report().count(&kind, with.wire_name()),
            Answer::Given(given) => {
                let finding = self.finding(format!("{kind} was answered: {given:?}"), name);
                self.course.report().violations.push(finding);
            }
            _ => self.note(&kind, &answer.label(|_| String::new()), answer, from, at, Patience::UntilDone, name),
        }
    }

    fn saw(&mut self, name: usize, seen: Seen) {
        if let Err(why) = self.beliefs[name].saw(seen) {
            self.violation(name, why);
            // told once; what was seen is believed from here on
            let there = match seen {
                Seen::NoDomain => There::Nothing,
                Seen::Volumes => There::Volumes,
                _ => return,
            };
            self.beliefs[name].is(there);
        }
    }

    fn is_asked_for(&self, name: usize, owner: Uid, instance: &Instance) {
        let vm_name = self.vm_name(name);
        let host = HOSTS[host_of(self.n, name)];
        let expected = (vm_name.clone(), uid(&vm_name, owner), host.to_owned(), format!("hosts/{host}/domains/{vm_name}"));
        let given = (instance.name.clone(), instance.uid.clone(), instance.host.clone(), instance.instance_id.clone());
        if given != expected {
            self.violation(name, format!("asked for {expected:?}, given {given:?}"));
        }
    }

    fn by_id(&self, name: usize, owner: Uid) -> InstanceById {
        let vm_name = self.vm_name(name);
        let instance_id = format!("hosts/{}/domains/{vm_name}", HOSTS[host_of(self.n, name)]);
        InstanceById { instance_id, uid: uid(&vm_name, owner), ..Default::default() }
    }

    fn by_key(&self, name: usize, owner: Uid) -> InstanceKey {
        let vm_name = self.vm_name(name);
        InstanceKey { uid: uid(&vm_name, owner), name: vm_name, ..Default::default() }
    }

    /// A key is looked for on every host.
    fn hosts(&self, name: usize, by: Selector) -> Vec<usize> {
        match by {
            Selector::Id => vec![host_of(self.n, name)],
            Selector::Key => (0..HOSTS.len()).collect(),
        }
    }
}

/// Refusals that the history of the name explains, not the weather; the belief judges them.
fn is_of_history<T>(answer: &Answer<T>) -> bool {
    let Answer::Refused { reason, .. } = answer else { return false };
    matches!(
        reason,
        Reason::NameOwnedByOtherUid
            | Reason::SpecConflict
            | Reason::VolumeConflict
            | Reason::PausedByAdmin
            | Reason::UidMismatch
            | Reason::InstanceNotFound
    )
}

fn short<T>(answer: &Answer<T>) -> String {
    match answer {
        Answer::Given(_) => "OK".to_owned(),
        Answer::Refused { reason, message } => format!("{}: {message}", reason.wire_name()),
        Answer::None(why) => format!("no answer: {why}"),
        Answer::Unreadable(why) => format!("unreadable: {why}"),
        Answer::Stuck => "stuck".to_owned(),
    }
}
