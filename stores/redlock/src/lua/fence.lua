-- Writes the fence that was chosen, if the lock is still this round's. KEYS: L, V, counter; ARGV: attempt, round, fence.
local attempt, fence = ARGV[1], tonumber(ARGV[3])
if redis.call('GET', KEYS[1]) ~= attempt then return 0 end
local v = vote(KEYS[2], attempt)
if not v or v.round ~= tonumber(ARGV[2]) or v.fence > fence then return 0 end
raise(KEYS[3], fence)
v.fence = fence
redis.call('SET', KEYS[2], text(attempt, v), 'KEEPTTL')
return 1
