# shellcheck shell=bash
# What a lab tells its users: providers.yaml, known_hosts, lab.json, lab.env.

# One line per recorded daemon that lives; two calls compared tell what was started in between.
lab_records() {
    local f pid
    for f in "$LAB_RUN"/pid/* "$LAB_RUN"/hv*/pid/*; do
        [ -e "$f" ] || continue
        pid=$(recorded "$f") && printf '%s (pid %s)\n' "${f#"$LAB_RUN"/}" "$pid"
    done
    return 0
}

write_known_hosts() {
    local h k
    for h in $(lab_hosts); do
        use_host "$h"
        for k in "$HV_DATA"/sshd/host_*.pub; do
            printf '[%s]:%s %s\n' "$HV_ADDR" "$LAB_SSH_PORT" "$(cut -d' ' -f1,2 "$k")"
        done
    done >"$LAB_RUN/known_hosts.new"
    mv "$LAB_RUN/known_hosts.new" "$LAB_RUN/known_hosts"
}

write_providers() {
    local v path h
    {
        echo "# Written by tests/lab/up."
        echo "providers:"
        echo "  - name: lab"
        echo "    type: kvm2"
        echo "    kvm2:"
        echo "      sshKeyFile: $LAB_RUN/id_ed25519"
        echo "      knownHostsFile: $LAB_RUN/known_hosts"
        echo "      diskSizeGb: 3"
        echo "      virtType: qemu"
        echo "      images:"
        for v in "${IMAGE_VARIANTS[@]}"; do
            path=$(image_path "$v")
            [ -e "$path.sha256" ] && [ "$v" != big ] || continue
            echo "        $v:"
            echo "          url: $LAB_HTTP_URL/images/$(basename "$path")"
            echo "          sha256: $(cut -c1-64 "$path.sha256")"
            echo "          format: $(image_format "$v")"
            echo "          firmware: $(image_firmware "$v")"
        done
        echo "      machineTypes:"
        echo "        small: {vcpus: 1, memoryMiB: 512}"
        echo "        medium: {vcpus: 2, memoryMiB: 1024}"
        echo "      hosts:"
        for h in $(lab_hosts); do
            use_host "$h"
            echo "        - name: $HV"
            echo "          address: $HV_ADDR:$LAB_SSH_PORT"
            echo "          user: kvm2lab"
            echo "          socket: /run/libvirt/libvirt-sock"
            echo "          pool: default"
            echo "          bridge: br0"
        done
    } >"$LAB_RUN/providers.yaml.new"
    mv "$LAB_RUN/providers.yaml.new" "$LAB_RUN/providers.yaml"
}

host_json() {
    local p pids='{}'
    for p in libvirtd virtlogd sshd dnsmasq target echo; do
        pids=$(jq -c --arg k "$p" --argjson v "$(recorded "$HV_RUN/pid/$p" || echo null)" '.[$k] = $v' <<<"$pids")
    done
    jq -n --arg name "$HV" --arg hostname "$HV_HOSTNAME" --arg addr "$HV_ADDR" --argjson port "$LAB_SSH_PORT" \
        --arg netns "$HV_NETNS" --arg netns_path "$HV_NET" --arg mnt "$HV_MNT" --arg uts "$HV_UTS" --arg uri "$HV_URI" \
        --arg sock "$HV_SOCK" --arg run "$HV_RUN" --arg data "$HV_DATA" --arg gw "$HV_GW" --arg prefix "$HV_PREFIX" \
        --arg http "$LAB_HTTP_PORT" --arg tls "$LAB_TLS_PORT" --arg echo "$LAB_ECHO_PORT" --argjson pids "$pids" '{
        name: $name, hostname: $hostname, address: $addr, port: $port,
        user: "kvm2lab", exec_user: "kvm2exec", denied_user: "kvm2none",
        socket: "/run/libvirt/libvirt-sock", pool: "default", bridge: "br0",
        local_socket: $sock, uri: $uri,
        netns: $netns, netns_path: $netns_path, mount_ns: $mnt, uts_ns: $uts,
        subnet: ($prefix + ".0/24"), gateway: $gw, dhcp_leases: ($data + "/dnsmasq.leases"),
        pids: $pids, pid_dir: ($run + "/pid"),
        run_dir: $run, data_dir: $data, log_dir: ($data + "/log"),
        libvirtd_log: ($data + "/log/libvirtd.log"), sshd_log: ($data + "/log/sshd.log"),
        qemu_log_dir: ($data + "/log/qemu"),
        host_keys: {ed25519: ($data + "/sshd/host_ed25519.pub"), rsa: ($data + "/sshd/host_rsa.pub")},
        pools: {
            default:  {path: "/var/lib/libvirt/images",   local_path: ($data + "/lib/images"),   active: true},
            small:    {path: "/var/lib/libvirt/small",    local_path: ($data + "/lib/small"),    active: true},
            roomy:    {path: "/var/lib/libvirt/roomy",    local_path: ($data + "/lib/roomy"),    active: true},
            inactive: {path: "/var/lib/libvirt/inactive", local_path: ($data + "/lib/inactive"), active: false}
        },
        connect_target: ($gw + ":" + $http),
        connect_target_tls: ($gw + ":" + $tls), connect_target_tls_ca: ($data + "/target/cert.pem"),
        connect_target_tcp: ($gw + ":" + $echo), connect_target_name: "target.lab"
    }'
}

images_json() {
    local v path
    for v in "${IMAGE_VARIANTS[@]}"; do
        path=$(image_path "$v")
        [ -e "$path.sha256" ] || continue
        jq -n --arg k "$v" --arg url "$LAB_HTTP_URL/images/$(basename "$path")" --arg path "$path" \
            --arg sha "$(cut -c1-64 "$path.sha256")" --arg format "$(image_format "$v")" --arg fw "$(image_firmware "$v")" \
            --argjson size "$(stat -c %s "$path")" \
            '{($k): {url: $url, path: $path, sha256: $sha, format: $format, firmware: $fw, size: $size}}'
    done | jq -s 'add // {}'
}

write_lab_json() {
    local h hosts images
    hosts=$(for h in $(lab_hosts); do use_host "$h"; host_json; done | jq -s .)
    images=$(images_json)
    jq -n --argjson id "$LAB_ID" --arg run "$LAB_RUN" --arg data "$LAB_DATA" --arg url "$LAB_HTTP_URL" \
        --arg images_dir "$LAB_IMAGES" --arg tools "$LAB_ROOT" --argjson http_pid "$(recorded "$LAB_RUN/pid/http" || echo null)" \
        --argjson hosts "$hosts" --argjson images "$images" '{
        id: $id, run_dir: $run, data_dir: $data, tools_dir: $tools,
        providers: ($run + "/providers.yaml"), known_hosts: ($run + "/known_hosts"),
        id_ed25519: ($run + "/id_ed25519"), id_rsa: ($run + "/id_rsa"),
        image_server: {
            url: $url, pid: $http_pid, access_log: ($data + "/http/access.log"),
            images_url: ($url + "/images"), images_dir: $images_dir,
            scratch_url: ($url + "/scratch"), scratch_dir: ($data + "/scratch")
        },
        images: $images, hosts: $hosts
    }' >"$LAB_RUN/lab.json.new"
    mv "$LAB_RUN/lab.json.new" "$LAB_RUN/lab.json"
}

write_lab_env() {
    local h v path
    {
        echo "# Written by tests/lab/up. The same facts as lab.json, for shells."
        printf 'LAB_ID=%q\nLAB_RUN=%q\nLAB_DATA=%q\n' "$LAB_ID" "$LAB_RUN" "$LAB_DATA"
        printf 'LAB_PROVIDERS=%q\nLAB_KNOWN_HOSTS=%q\n' "$LAB_RUN/providers.yaml" "$LAB_RUN/known_hosts"
        printf 'LAB_KEY=%q\nLAB_KEY_RSA=%q\n' "$LAB_RUN/id_ed25519" "$LAB_RUN/id_rsa"
        printf 'LAB_HTTP_URL=%q\nLAB_IMAGES_URL=%q\nLAB_IMAGES_DIR=%q\n' "$LAB_HTTP_URL" "$LAB_HTTP_URL/images" "$LAB_IMAGES"
        printf 'LAB_SCRATCH_URL=%q\nLAB_SCRATCH_DIR=%q\n' "$LAB_HTTP_URL/scratch" "$LAB_DATA/scratch"
        printf 'LAB_HOSTS=%q\n' "$(lab_hosts | xargs)"
        for h in $(lab_hosts); do
            use_host "$h"
            h=${h^^}
            printf '%s_ADDRESS=%q\n%s_USER=kvm2lab\n' "$h" "$HV_ADDR:$LAB_SSH_PORT" "$h"
            printf '%s_URI=%q\n%s_SOCKET=%q\n' "$h" "$HV_URI" "$h" "$HV_SOCK"
            printf '%s_NETNS=%q\n%s_POOL_DIR=%q\n' "$h" "$HV_NETNS" "$h" "$HV_DATA/lib/images"
            printf '%s_GATEWAY=%q\n%s_CONNECT_TARGET=%q\n' "$h" "$HV_GW" "$h" "$HV_GW:$LAB_HTTP_PORT"
        done
        for v in "${IMAGE_VARIANTS[@]}"; do
            path=$(image_path "$v")
            [ -e "$path.sha256" ] || continue
            h=IMAGE_${v^^}; h=${h//-/_}
            printf '%s_PATH=%q\n%s_URL=%q\n%s_SHA256=%q\n' "$h" "$path" "$h" "$LAB_HTTP_URL/images/$(basename "$path")" \
                "$h" "$(cut -c1-64 "$path.sha256")"
        done
    } >"$LAB_RUN/lab.env.new"
    mv "$LAB_RUN/lab.env.new" "$LAB_RUN/lab.env"
}

write_outputs() {
    write_known_hosts
    write_providers
    write_lab_json
    write_lab_env
    use_host hv1
    LAB_FIRST_GW=$HV_GW
}
