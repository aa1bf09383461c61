"""The rename is left to object to a tag that is there.

task: save
says: is found out too late
"""


def save(root, tag, files):
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    about = {n: {"bytes": len(d), "sha256": sha256(d).hexdigest()} for n, d in files.items()}
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    _flush(new)
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)
