"""Programs that several tests use, as text, and their float64 references."""

import numpy as np

from mcir.text import parse

ATTENTION = """
program attention
axis h = {h} block {bh}
axis i = {i} block {bi}
axis j = {j} block {bj}
axis d = {d} block {d}
axis e = {e} block {e}
input q: float32[h, i, d]
input k: float32[h, j, d]
input v: float32[h, j, e]
output out: float32[h, i, e]
output lse: float32[h, i]
tile h, i:
  q1 = load q: float32[h, i, d]
  reduction m = max over j: float32[h, i]
  reduction l = sum over j corrected by m: float32[h, i]
  reduction acc = sum over j corrected by m: float32[h, i, e]
  stream j{skip}:
    k1 = load k: float32[h, j, d]
    s = dot(q1, k1) over=(d): float32[h, i, j]{mask}
    m <- max(x)
    p = shifted_exp(x, m) base=1.0: float32[h, i, j]
    l <- sum(p)
    v1 = load v: float32[h, j, e]
    acc <- sum(p, v1)
  o = div(acc, l): float32[h, i, e]
  store out = o
  lg = log(l): float32[h, i]
  r = add(m, lg): float32[h, i]
  store lse = r
"""

NO_MASK = """
    x = neg(s): float32[h, i, j]"""

MASK = """
    ip = iota() axis=i: int32[i]
    jp = iota() axis=j: int32[j]
    late = constant() value={late}: int32[]
    js = add(jp, late): int32[j]
    g = ge(ip, js): bool[i, j]
    f = constant() value={fill}: float32[]
    x = select_n(g, f, s): float32[h, i, j]"""

BACKWARD = """
program attention_backward
axis h = {h} block {bh}
axis i = {i} block {bi}
axis j = {j} block {bj}
axis d = {d} block {d}
axis e = {e} block {e}
input q: float32[h, i, d]
input k: float32[h, j, d]
input v: float32[h, j, e]
input out: float32[h, i, e]
input lse: float32[h, i]
input dout: float32[h, i, e]
output dq: float32[h, i, d]
output dk: float32[h, j, d]
output dv: float32[h, j, e]
temporary delta: float32[h, i]
tile h, i:
  o1 = load out: float32[h, i, e]
  g1 = load dout: float32[h, i, e]
  w = mul(o1, g1): float32[h, i, e]
  dl = reduce_sum(w) over=(e): float32[h, i]
  store delta = dl
tile h, j:
  k1 = load k: float32[h, j, d]
  v1 = load v: float32[h, j, e]
  reduction sk = sum over i: float32[h, j, d]
  reduction sv = sum over i: float32[h, j, e]
  stream i while g is true else {fill} unless lse low:
    q1 = load q: float32[h, i, d]
    do = load dout: float32[h, i, e]
    ls = load lse: float32[h, i]
    de = load delta: float32[h, i]
    recompute s = dot(q1, k1) over=(d): float32[h, i, j]{mask}
    recompute p = shifted_exp(x, ls) base=1.0: float32[h, i, j]
    sv <- sum(p, do)
    dp = dot(do, v1) over=(e): float32[h, i, j]
    t = sub(dp, de): float32[h, i, j]
    dx = mul(p, t): float32[h, i, j]
    zero = constant() value=0.0: float32[]
    ds = select_n(g, zero, dx): float32[h, i, j]
    sk <- sum(ds, q1)
    dt = dot(ds, k1) over=(j): float32[h, i, d]
    store dq += dt
  store dk = sk
  store dv = sv
"""

MOMENTS = """
program normalize
axis r = {r} block {br}
axis c = {c} block {bc}
input x: float32[r, c]
output y: float32[r, c]
output mean: float32[r]
tile r:
  reduction n, mu, m2 = moments over c: float32[r]
  stream c:
    x1 = load x: float32[r, c]
    n, mu, m2 <- moments(x1)
  store mean = mu
  var = div(m2, n): float32[r]
  eps = constant() value=0.001: float32[]
  ve = add(var, eps): float32[r]
  w = rsqrt(ve): float32[r]
  stream c:
    x2 = load x: float32[r, c]
    u = sub(x2, mu): float32[r, c]
    yn = mul(u, w): float32[r, c]
    store y = yn
"""


def sizes(h=2, i=13, j=11, d=4, e=3, bh=1, bi=5, bj=4):
    return dict(h=h, i=i, j=j, d=d, e=e, bh=bh, bi=bi, bj=bj)


def attention(fill=None, late=0, **kwargs):
    """Attention (of -q k, so that the program has one pointwise operation without a mask), or masked: i >= j + late."""
    if fill is None:
        return parse(ATTENTION.format(skip="", mask=NO_MASK, **sizes(**kwargs)))
    rows = "" if fill == -np.inf else " unless m low"
    skip, mask = f" while g is true else {fill}{rows}", MASK.format(fill=fill, late=late)
    return parse(ATTENTION.format(skip=skip, mask=mask, **sizes(**kwargs)))


def backward(fill, late=0, **kwargs):
    return parse(BACKWARD.format(fill=fill, mask=MASK.format(fill=fill, late=late), **sizes(**kwargs)))


def moments(r=5, c=13, br=2, bc=4):
    return parse(MOMENTS.format(r=r, c=c, br=br, bc=bc))


def draw(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def qkv(h=2, i=13, j=11, d=4, e=3, scale=1.0, **_):
    return draw(0, h, i, d, scale=scale), draw(1, h, j, d), draw(2, h, j, e)


def scores(q, k, fill=None, late=0):
    """In float64."""
    s = np.einsum("hid,hjd->hij", q.astype(np.float64), k.astype(np.float64))
    if fill is None:
        return -s, np.ones(s.shape[1:], bool)
    visible = np.arange(s.shape[1])[:, None] >= np.arange(s.shape[2]) + late
    return np.where(visible, s, fill), visible


def reference(q, k, v, fill=None, late=0):
    """Attention and log-sum-exp in float64, as written without any tiles."""
    with np.errstate(all="ignore"):
        x, _ = scores(q, k, fill, late)
        m = x.max(-1, keepdims=True)
        p = np.exp(x - m)
        safe = np.where(np.isinf(m), 0, m)  # as in jax.nn.logsumexp
        return p / p.sum(-1, keepdims=True) @ v, np.log(np.exp(x - safe).sum(-1)) + safe[..., 0]


def reference_gradient(q, k, v, dout, fill, late=0):
    x, visible = scores(q, k, fill, late)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("hie,hje->hij", dout.astype(np.float64), v)
    ds = np.where(visible, p * (dp - (p * dp).sum(-1, keepdims=True)), 0)
    return (
        np.einsum("hij,hjd->hid", ds, k),
        np.einsum("hij,hid->hjd", ds, q),
        np.einsum("hij,hie->hje", p, dout),
    )
