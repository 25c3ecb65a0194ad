-- Removes a request from one queue. KEYS: the queue; ARGV: the member, the highest ticket that the release applies to (0: any).
local ticket = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ticket or (ARGV[2] ~= '0' and tonumber(ticket) > tonumber(ARGV[2])) then return 0 end
return redis.call('ZREM', KEYS[1], ARGV[1])
