#!/bin/bash
# logind.sh DIRECTORY: systemd's logind for the kubelets of a cluster, on a bus of its own: run inside of the cluster, it
# comes back when logind answers. Nodes may delay their shutdown by a minute. There is no systemd that it could tell to
# shut down anything.
set -euo pipefail
dir=$1/logind
mkdir "$dir"
cat >"$dir/bus.conf" <<-END
	<busconfig>
	<type>system</type>
	<listen>unix:path=/run/dbus/system_bus_socket</listen>
	<auth>EXTERNAL</auth>
	<policy context="default"><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy>
	</busconfig>
END
printf '[Login]\nInhibitDelayMaxSec=60\n' >"$dir/logind.conf"
for place in /run/dbus /run/systemd; do
	mkdir -p "$place"
	mount -t tmpfs tmpfs "$place"
done
mkdir /run/systemd/{inhibit,seats,sessions,users}
mount --bind "$dir/logind.conf" /etc/systemd/logind.conf
setsid dbus-daemon --config-file="$dir/bus.conf" --nofork --nopidfile >>"$1/log/logind.log" 2>&1 </dev/null &
until [ -S /run/dbus/system_bus_socket ]; do sleep 0.1; done
setsid /lib/systemd/systemd-logind >>"$1/log/logind.log" 2>&1 </dev/null &
for _ in {1..100}; do
	dbus-send --system --print-reply --dest=org.freedesktop.login1 /org/freedesktop/login1 \
		org.freedesktop.DBus.Properties.Get string:org.freedesktop.login1.Manager \
		string:InhibitDelayMaxUSec 2>/dev/null | grep -q ' 60000000$' && exit
	sleep 0.3
done
echo "logind does not answer" >&2
exit 1
