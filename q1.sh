. /tmp/k11/env.sh
cat /proc/loadavg
timeout 60 $PY /tmp/k11/mem.py
timeout 60 $PY /tmp/k11/parts.py
timeout 60 $PY /tmp/k11/touch.py 20
timeout 160 $PY /tmp/k11/ab.py 4096 12 4 64 local,bigbird,fixed /tmp/k11/v0 /tmp/k11/v2 /tmp/k11/v2:17 /tmp/k11/v3 /tmp/k11/v3:17
timeout 60 $PY /tmp/k11/ab.py 4096 8 1 64 local /tmp/k11/v0 /tmp/k11/v2 /tmp/k11/v3:17
cat /proc/loadavg
