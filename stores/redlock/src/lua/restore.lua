-- Sets a lock that a majority of the nodes has just renewed at a node that does not have it. KEYS: L, V, counter;
-- ARGV: attempt, ttl in ms, fence, V as another node has it.
local ended = tonumber(redis.call('GET', TOMBSTONE .. ARGV[1]) or '-1')
raise(KEYS[3], tonumber(ARGV[3]))
-- The grant was released before this arrived.
if tonumber(string.match(ARGV[4], '^' .. VERSION .. ' %x+ (%d+) ') or '0') <= ended then return 0 end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
return 1
