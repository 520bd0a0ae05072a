#!/usr/bin/perl
# Adopts and reaps the orphans of a command: reaper.pl PIDFILE COMMAND...
#
# libvirt's QEMU processes daemonise themselves, so that the machine's first process must reap them, and libvirt
# waits until it has. The first process of a container may only look every two seconds, which would add those two
# seconds to each destroy and to each probe of QEMU's capabilities. A real host's init reaps at once; so does this.
# It writes the command's pid to PIDFILE, outlives the command, and ends with the last descendant.
use strict;
use warnings;

use constant PR_SET_CHILD_SUBREAPER => 36;
my %sys_prctl = (x86_64 => 157, aarch64 => 167);

my $pidfile = shift @ARGV;
chomp(my $machine = `uname -m`);
syscall($sys_prctl{$machine}, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) if $sys_prctl{$machine};

my $pid = fork // die "fork: $!";
if ($pid == 0) { exec { $ARGV[0] } @ARGV or die "exec $ARGV[0]: $!" }

open(my $f, '>', "$pidfile.new") or die "$pidfile: $!";
print $f "$pid\n";
close $f;
rename "$pidfile.new", $pidfile or die "$pidfile: $!";

# Nothing must end it before its last child: the host's other processes are ended one by one.
$SIG{TERM} = $SIG{INT} = $SIG{HUP} = 'IGNORE';
$0 = "kvm2-lab reaper of $pid";
1 while wait != -1;
