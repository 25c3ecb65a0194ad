-- The view of one lock at this node. KEYS: L, V.
local value = redis.call('GET', KEYS[1])
if not value then return { now_us() } end
return { now_us(), seen(KEYS[1], KEYS[2], value) }
